"""Between blocks a rank holds its part of the sequence; gradients are the unsharded model's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train import strategies
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.hf import sequence_parallel as sp
from dynaflow_train.integrations.hf import tensor_parallel as tp
from dynaflow_train.integrations.hf.launching import shard
from dynaflow_train.strategies.dual_batch import DualBatch
from tests.collectives import CountCollectives
from tests.engine.harness import Switch
from tests.hf.models import build, oracle, plain_step, tokens, worst_excess
from tests.ranks import run_ranks

LAYERS = 2
STRATEGIES = ("sequential", "comm_overlap", "dual_batch")
BATCHES = [tokens(0), tokens(1)]  # accumulated: a gradient summed twice would show


def sharded(name: str, **changes: Any) -> Any:
    return tp.parallelize(build(name, **{"layers": LAYERS, **changes}), 2, sequence=True)


def scheduled(name: str, region: str, names: tuple[str, ...]) -> dict[str, Any]:
    """By strategy: the excess error and where, and sizes of micro-batches, from one capture."""
    model, found = sharded(name), {}
    wanted, switch = oracle(name, BATCHES, layers=LAYERS), Switch(*DualBatch.rules)
    df.compile(model, switch, region=region, executor="eager")
    for each in names:
        switch.use(strategies.get(each))
        step = plain_step(model, BATCHES, tp.full_gradients)
        latest = {(u.region.name, u.plan.phase): u.plan for u in df.plans(model)}
        sizes = {plan.sizes for plan in latest.values()}
        found[f"{name} {region} {each}"] = (*worst_excess(step, *wanted), sizes)
        model.zero_grad()
    return found


def plain_biases() -> tuple[float, str]:
    biases = {"attention_bias": True, "mlp_bias": True, "layers": LAYERS}
    step = plain_step(sharded("llama", **biases), BATCHES, tp.full_gradients)
    return worst_excess(step, *oracle("llama", BATCHES, **biases))


def collectives() -> list[dict[str, int]]:
    """Of a forward and a backward of a model that the launcher sharded by a recipe."""
    os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "2"
    recipe = df.Recipe("sequential", tensor_parallel="sequence")
    model = shard(build("llama", layers=LAYERS), recipe).model
    with CountCollectives() as forward:
        out = model(input_ids=tokens(0)).last_hidden_state
    with CountCollectives() as backward:
        out.sum().backward()
    return [dict(mode.counts) for mode in (forward, backward)]


def seen_by_norms(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes that the norms of one layer and the last norm get."""
    shapes: list[tuple[int, ...]] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        del module
        shapes.append(tuple(args[0].shape))

    layer = model.get_submodule("model.layers.1")
    norms = (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm)
    hooks = [each.register_forward_pre_hook(look) for each in norms]
    model(tokens(0))
    for hook in hooks:
        hook.remove()
    return shapes


def evaluated() -> dict[str, Any]:
    """In eval mode: logits of an odd length, and gradients, against the unsharded model."""
    model, plain = sharded("llama").eval(), build("llama", layers=LAYERS).eval()
    ids = tokens(3, length=11)
    with torch.no_grad():
        logits = (model(ids).logits - plain(ids).logits).abs().max().item()
    step = plain_step(model, BATCHES, tp.full_gradients)
    off = worst_excess(step, *oracle("llama", BATCHES, layers=LAYERS))
    model.train()
    refused = pytest.raises(UnsupportedError, match="over 2 ranks needs .* by 2, found 11: pad")
    with refused:
        model(ids)
    with refused:
        model(inputs_embeds=torch.zeros(1, 11, 32))
    return {"logits": logits, "step": off, "shapes": seen_by_norms(model)}


def everything(rank: int) -> dict[str, Any]:
    del rank
    return {
        "biases": plain_biases(),
        "collectives": collectives(),
        "evaluated": evaluated(),
        "scheduled": scheduled("llama", "model", STRATEGIES)
        | scheduled("mistral", "model", ("dual_batch",))
        | scheduled("qwen3", "layer", ("dual_batch",)),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(everything, 2, timeout_s=280)


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_every_strategy_gives_the_unsharded_gradients(found):
    for rank in found:
        assert {key.rpartition(" ")[2] for key in rank["scheduled"]} == set(STRATEGIES)
        assert len(rank["scheduled"]) == 5
        for label, (excess, where, sizes) in rank["scheduled"].items():
            assert excess < 4, f"{label}: {where}"
            assert sizes == {(2, 2) if "dual" in label else (4,)}, label
        assert rank["biases"][0] < 4, rank["biases"]


@pytest.mark.dist
def test_what_is_communicated_and_where_the_sequence_is_cut(found):
    """A layer: 2 gathers and 2 scatters each way, and its norms' weights; the ends: one gather."""
    for rank in found:
        forward, backward = rank["collectives"]
        gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
        assert forward == {gather: 2 * LAYERS + 1, scatter: 2 * LAYERS}
        assert backward == {gather: 2 * LAYERS + 1, scatter: 2 * LAYERS, "all_reduce": 2 * LAYERS}
        assert rank["evaluated"]["shapes"] == [(4, 6, 32), (4, 6, 32), (4, 12, 32)]


@pytest.mark.dist
def test_outside_of_training_any_length_runs_and_gradients_hold(found):
    for rank in found:
        assert rank["evaluated"]["logits"] < 1e-5
        assert rank["evaluated"]["step"][0] < 4, rank["evaluated"]["step"]


def test_a_parameter_between_blocks_that_is_no_norm_is_refused():
    model = build("llama")
    model.model.layers[0].extra = nn.Linear(32, 32)
    with pytest.raises(UnsupportedError, match=r"parameters in 'model.layers.\*.extra' \(Linear\)"):
        sp.plan_for(model)


def test_the_plan_names_norms_and_leaves_heads_norms_as_they_are():
    plan = sp.plan_for(build("qwen3"))
    assert plan["model.layers.*.input_layernorm"] == sp.NORM
    assert plan["model.layers.*.self_attn.q_norm"] == tp.SHARED
    assert plan["model.layers.*.mlp"] == sp.BLOCK
    assert "model.norm" not in plan
