"""Our styles: gradients of the unsharded model, 2 all-reduces a layer and direction, one graph."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import GPT2Config, LlamaConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.hf import tensor_parallel as tp
from tests.collectives import CountCollectives
from tests.hf.models import build, oracle, plain_step, tokens, worst_excess
from tests.ranks import run_ranks

LAYERS = 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"name": "llama"},
    "llama-biases": {"name": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"name": "llama", "tie_word_embeddings": True},
    "qwen3": {"name": "qwen3"},
}


def sharded_step(rank: int, model: dict[str, Any], steps: int, backend: str | None) -> Any:
    del rank
    sharded = tp.parallelize(build(layers=LAYERS, **model), 2)
    if backend:
        for layer in sharded.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    batches = [tokens(i) for i in range(steps)]
    step = plain_step(sharded, batches, tp.full_gradients)
    return worst_excess(step, *oracle(batches=batches, layers=LAYERS, **model))


@pytest.mark.dist
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_two_accumulated_steps_equal_the_unsharded_model(model, backend):
    for excess, where in run_ranks(sharded_step, 2, MODELS[model], 2, backend):
        assert excess < 4, where


def collectives(rank: int, model: dict[str, Any]) -> list[dict[str, int]]:
    del rank
    sharded = tp.parallelize(build(layers=LAYERS, **model), 2).model
    with CountCollectives() as forward:
        loss = sharded(input_ids=tokens(0)).last_hidden_state.sum()
    with CountCollectives() as backward:
        loss.backward()
    return [dict(mode.counts) for mode in (forward, backward)]


@pytest.mark.dist
@pytest.mark.parametrize(("model", "norms"), [("llama", 0), ("qwen3", 2)])
def test_two_all_reduces_a_layer_and_direction(model, norms):
    """Qwen3 adds the gradients of q_norm and k_norm: two of head_dim elements, backward."""
    wanted = [{"all_reduce": 2 * LAYERS}, {"all_reduce": (2 + norms) * LAYERS}]
    assert run_ranks(collectives, 2, MODELS[model]) == [wanted, wanted]


def captured_targets(rank: int, model: dict[str, Any], whole: bool, tp_size: int) -> list[Any]:
    """How often each operator that communicates or copies is in each graph, forward first."""
    del rank
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return make_boxed_func(graph)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    plain = build(layers=LAYERS, **model)
    decoder = (tp.parallelize(plain, tp_size) if tp_size > 1 else plain).model
    for region in [decoder] if whole else decoder.layers:
        region.compile(backend=backend, fullgraph=True)
    decoder(input_ids=tokens(0)).last_hidden_state.sum().backward()
    watched = ("c10d", "copy", "clone", "dtensor")
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    return [collections.Counter(t for t in ts if any(w in t for w in watched)) for ts in targets]


@pytest.mark.dist
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "model"])
@pytest.mark.parametrize(("model", "norms"), [("llama", 0), ("qwen3", 2)])
def test_graphs_differ_from_the_unsharded_ones_by_their_collectives_only(model, norms, whole):
    """One forward and one backward graph, no copy and no DTensor operator added.

    Compared with a model of one rank's size.
    """
    layers = LAYERS if whole else 1
    local = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    (plain,) = run_ranks(captured_targets, 1, {**MODELS[model], **local}, whole, 1)
    wanted = [
        copies
        + collections.Counter(
            {f"_c10d_functional.{op}.default": n for op in ("all_reduce", "wait_tensor")}
        )
        for copies, n in zip(plain, (2 * layers, (2 + norms) * layers), strict=True)
    ]
    assert run_ranks(captured_targets, 2, MODELS[model], whole, 2) == [wanted, wanted]


def host_plan(rank: int, model: dict[str, Any]) -> str:
    from transformers.distributed.configuration_utils import DistributedConfig

    del rank
    plain = build(layers=1, **model)
    config, _, mesh = type(plain).prepare_distribute_model(DistributedConfig(tp_size=2))
    sharded = type(plain).maybe_distribute_model(plain, config, mesh)
    try:
        tp.check_host_plan(sharded)
    except UnsupportedError as refused:
        return str(refused)
    return "accepted"


@pytest.mark.dist
def test_host_plan_with_wrong_gradients_is_refused():
    llama = run_ranks(host_plan, 2, MODELS["llama"])
    qwen3 = run_ranks(host_plan, 2, MODELS["qwen3"])
    assert llama == ["accepted"] * 2
    assert "k_norm sums the accumulated gradient once per micro-step" in qwen3[0]
    assert qwen3[0] == qwen3[1]


def test_plan_names_blocks_and_keeps_the_head():
    plan = tp.plan_for(build("qwen3"))
    assert plan["model.layers.*.self_attn"] == plan["model.layers.*.mlp"] == tp.BLOCK
    assert plan["model.layers.*.self_attn.k_norm"] == tp.SHARED
    assert plan["model.layers.*.mlp.down_proj"] == tp.ROW
    assert plan["lm_head"] == "colwise_gather_output"
    assert tp.plan_for(build("llama", tie_word_embeddings=True))["lm_head"] == tp.WHOLE
    assert tp.plan_for(build("llama").config) == tp.plan_for(build("llama"))


def test_block_with_an_unnamed_parameter_is_refused():
    model = build("qwen3")
    plan = model.tp_plan
    model._tp_plan = {k: v for k, v in plan.items() if not k.endswith("k_norm")}
    with pytest.raises(UnsupportedError, match=r"name model\.layers\.\*\.self_attn\.k_norm"):
        tp.plan_for(model)


def test_unknown_style_and_missing_plan_are_refused():
    model = build("llama")
    model._tp_plan = {**model.tp_plan, "model.norm": "sequence_parallel"}
    with pytest.raises(UnsupportedError, match="'model.norm' with style 'sequence_parallel'"):
        tp.plan_for(model)
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        tp.plan_for(GPT2Config(n_layer=1, n_head=2, n_embd=8))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UnsupportedError, match="over 4 ranks needs num_key_value_heads .* found 2"):
        tp.parallelize(build("llama"), 4)


def test_styles_enter_the_registry_and_leave_it():
    undo = tp.apply()
    second = tp.apply()
    second()
    assert tp.BLOCK in ALL_PARALLEL_STYLES
    undo()
    assert tp.BLOCK not in ALL_PARALLEL_STYLES


@pytest.mark.parametrize("version", ["5.16.2", "4.57.0", "6.0.0"])
def test_unknown_transformers_is_refused(monkeypatch, version):
    monkeypatch.setattr(tp.transformers, "__version__", version)
    with pytest.raises(UnsupportedError, match=f"5.17 up to 5.x, found {version}"):
        tp.apply()


def test_no_process_group_is_needed_to_plan():
    assert not dist.is_initialized()
    assert tp.plan_for(LlamaConfig(num_hidden_layers=1))["model.layers.*.mlp"] == tp.BLOCK
