"""Llama and Qwen3 on two ranks: every strategy and region gives the unsharded model's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train import strategies
from dynaflow_train.integrations.hf import checkpointing
from dynaflow_train.integrations.hf import tensor_parallel as tp
from dynaflow_train.strategies.dual_batch import DualBatch
from tests.engine.harness import Switch
from tests.hf.models import Step, build, oracle, plain_step, tokens, worst_excess
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
EAGER: dict[str, Any] = {"executor": "eager"}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequential": ("sequential", {}),
    "comm_overlap": ("comm_overlap", {}),
    "dual_batch": ("dual_batch", {}),
    "three micro-batches": ("dual_batch", {"micro_batches": 3}),
    "merged wgrads": ("dual_batch", {"merge_wgrads": True}),
    "uneven": ("nanoflow", {"sizes": [3, 1]}),
}
BATCHES = 2


def batches() -> list[torch.Tensor]:
    return [tokens(i) for i in range(BATCHES)]


def every_strategy(rank: int, name: str, region: str) -> dict[str, Any]:
    """Excess error and micro-batches by strategy, all from one capture."""
    del rank
    model, found = tp.parallelize(build(name), 2), {}
    wanted, switch = oracle(name, batches()), Switch(*DualBatch.rules)
    df.compile(model, switch, region=region, **EAGER)
    for label, (strategy, parameters) in STRATEGIES.items():
        switch.use(strategies.get(strategy, **parameters))
        step = plain_step(model, batches(), tp.full_gradients)
        latest = {(u.region.name, u.plan.phase): u.plan for u in df.plans(model)}
        found[label] = (*worst_excess(step, *wanted), {plan.sizes for plan in latest.values()})
        model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("region", ["model", "layer"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_strategies_give_the_unsharded_gradients(name, region):
    for found in run_ranks(every_strategy, 2, name, region, timeout_s=500):
        assert {k: sizes for k, (*_, sizes) in found.items()} == {
            "sequential": {(4,)},
            "comm_overlap": {(4,)},
            "dual_batch": {(2, 2)},
            "three micro-batches": {(2, 1, 1)},
            "merged wgrads": {(2, 2)},
            "uneven": {(3, 1)},
        }
        for label, (excess, where, _) in found.items():
            assert excess < 4, f"{label}: {where}"


def autocast_step(rank: int, name: str, region: str) -> Any:
    """bf16 autocast; the plain run's own bf16 error is the measure."""
    del rank

    def step(model: nn.Module, gradients: Any = None) -> Step:
        with torch.autocast("cpu", torch.bfloat16):
            return plain_step(model, batches(), gradients)

    model = tp.parallelize(build(name), 2)
    df.compile(model, "dual_batch", region=region, **EAGER)
    _, truth = oracle(name, batches())
    ours, plain = step(model, tp.full_gradients), step(build(name))
    return worst_excess(ours, plain, truth, least=torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("region", ["model", "layer"])
def test_bf16_autocast_is_as_exact_as_the_plain_run(region):
    for excess, where in run_ranks(autocast_step, 2, "llama", region):
        assert excess < 2, where


def checkpointed_step(rank: int, name: str) -> Any:
    """Errors, plans, and how often layers were checkpointed and their compiled code was run."""
    del rank
    model = tp.parallelize(build(name), 2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    df.compile(model, "dual_batch", region="layer", **EAGER)
    calls = {"checkpointed": 0, "compiled": 0}

    def counting(what: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[what] += 1
            return plain(*args, **kwargs)

        return call

    for layer in model.model.layers:
        dispatcher = layer._compiled_call_impl
        dispatcher.compiled = counting("compiled", dispatcher.compiled)
        layer._gradient_checkpointing_func = counting(
            "checkpointed", layer._gradient_checkpointing_func
        )
    undo = checkpointing.hoist(model)
    step = plain_step(model, batches(), tp.full_gradients)
    sizes = {used.plan.sizes for used in df.plans(model)}
    undo()
    return (*worst_excess(step, *oracle(name, batches())), sizes, calls)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_activation_checkpointing_around_layers(name):
    """Two layers, two batches: each layer is checkpointed and runs again in the backward."""
    for excess, where, sizes, calls in run_ranks(checkpointed_step, 2, name):
        assert excess < 4, where
        assert sizes == {(2, 2)}
        assert calls == {"checkpointed": 4, "compiled": 8}


def evaluated(rank: int, region: str) -> Any:
    """Tokens and logits of a compiled model against the same model plain."""
    del rank
    model, options = tp.parallelize(build("llama"), 2), {"max_new_tokens": 6, "do_sample": False}

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        model.eval()
        model.config.use_cache = True
        with torch.no_grad():
            seen = model(tokens(3)).logits, model.generate(tokens(2), pad_token_id=0, **options)
        model.config.use_cache = False
        model.train()
        return seen

    before = look()
    df.compile(model, "dual_batch", region=region, **EAGER)
    plain_step(model, batches(), tp.full_gradients)
    graphs = len(df.plans(model))
    after = look()
    return [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)], (
        len(df.plans(model)) - graphs
    )


@pytest.mark.parametrize("region", ["model", "layer"])
def test_evaluation_and_generation_stay_plain(region):
    assert run_ranks(evaluated, 2, region) == [([True, True], 0)] * 2


def data_parallel_step(rank: int, kind: str) -> Any:
    """One batch a rank; DDP and FSDP2 average the gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = build("llama")
    grouped = {"region": "model", "layers_per_region": 1}
    regions: dict[str, Any] = grouped if kind == "ddp, groups" else {"region": "layer"}
    df.compile(model, "dual_batch", **regions, **EAGER)
    if kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped = model if kind == "fsdp2" else DistributedDataParallel(model)
    wrapped(input_ids=tokens(rank), labels=tokens(rank)).loss.backward()
    sizes = {used.plan.sizes for used in df.plans(model)}
    plain, truth = (
        Step((), {name: gradient / 2 for name, gradient in each.gradients.items()})
        for each in oracle("llama", [tokens(0), tokens(1)])
    )
    return worst_excess(Step((), tp.full_gradients(model)), plain, truth), sizes


@pytest.mark.parametrize("kind", ["ddp", "ddp, groups", "fsdp2"])
def test_data_parallel_wrappers_around_compiled_layers(kind):
    for (excess, where), sizes in run_ranks(data_parallel_step, 2, kind):
        assert excess < 4, where
        assert sizes == {(2, 2)}
