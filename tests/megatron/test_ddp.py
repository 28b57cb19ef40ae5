"""Megatron's data parallelism around compiled layers: main_grad, overlap, optimizers."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.megatron.models import Case
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, MICRO_STEPS = 3, 2
# Distributed optimizer, overlap_param_gather, strategy, region, wgrads straight into main_grad.
RUNS = [
    (False, False, "sequential", "layer", False),
    (True, False, "sequential", "model", False),
    (True, True, "dual_batch", "layer", False),
    (True, True, "dual_batch", "model", False),
    (True, True, "dual_batch", "layer", True),
]


def wrapped(model: Any, distributed: bool, gather: bool) -> tuple[Any, Any]:
    """Megatron's data parallelism around the model, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.megatron import cpu

    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            use_distributed_optimizer=distributed,
            overlap_param_gather=gather,
            bucket_size=4000,
        ),
        model,
    )
    with cpu.SaysCuda():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                adam_eps=0.1,  # so that a step follows its gradient and not its sign alone
                use_distributed_optimizer=distributed,
                overlap_param_gather=gather,
                params_dtype=torch.float32,
            ),
            [ddp],
        )
    return ddp, optimizer


@contextlib.contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """The parameters whose gradients are ready, and when buckets are reduced, in order."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    names = {p: n for n, p in model.named_parameters()}
    events: list[str] = []
    group = buffers._ParamAndGradBucketGroup
    ready, sync = group.register_grad_ready, group.start_grad_sync

    def seen_ready(self, param, *rest):
        events.append(names[param])
        return ready(self, param, *rest)

    def seen_sync(self, *args, **kwargs):
        events.append("sync")
        return sync(self, *args, **kwargs)

    group.register_grad_ready, group.start_grad_sync = seen_ready, seen_sync
    try:
        yield events
    finally:
        group.register_grad_ready, group.start_grad_sync = ready, sync


def train(model: Any, distributed: bool, gather: bool) -> dict[str, Any]:
    """Three steps of two micro-steps each; what they came to, and when gradients were ready."""
    from tests.megatron import cpu, models

    ddp, optimizer = wrapped(model, distributed, gather)
    losses, fired = [], []
    with watched(model) as events:
        for number in range(STEPS):
            events.clear()
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            for micro_step in range(MICRO_STEPS):
                last = micro_step == MICRO_STEPS - 1
                seed = 100 * number + 10 * micro_step + torch.distributed.get_rank()
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = ddp(**models.batch(seed)).mean()
                    loss.backward()
                losses.append(loss.item())
            left = sum(p.grad is not None for p in model.parameters())
            fired.append([*events])
            ddp.finish_grad_sync()
            grads = {n: p.main_grad.clone() for n, p in model.named_parameters()}
            with cpu.SaysCuda():
                optimizer.step()
    if gather:
        ddp.start_param_sync(force_sync=True)
    return {
        "losses": losses,
        "main_grad": grads,
        "dtypes": {g.dtype for g in grads.values()},
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "left": left,
        "fired": fired,
    }


def layers_and_syncs(events: list[str]) -> list[str]:
    """The events by layer, repetitions left out."""
    short = [re.sub(r".*layers\.(\d+)\..*", r"\1", e) for e in events]
    return [e for i, e in enumerate(short) if e == "sync" or short[i - 1] != e]


def with_and_without(rank: int) -> list[Any]:
    del rank
    from dynaflow_train.integrations import megatron
    from tests.engine.stepping import Result
    from tests.megatron import models

    case = Case(tp=1, bias=True, layers=3)
    models.start(case)
    found, host = [], {}
    for distributed, gather, strategy, region, direct in RUNS:
        if (distributed, gather) not in host:
            host[distributed, gather] = train(models.build(case), distributed, gather)
        wanted = host[distributed, gather]
        torch._dynamo.reset()
        with megatron.apply(attention_kind="host"):
            model = models.build(case)
            options = {"executor": "eager", "region": region, "strict": True}
            megatron.compile(model, strategy, into_main_grad=direct, **options)
            ours = train(model, distributed, gather)
        found.append(
            {
                "losses": (ours["losses"], wanted["losses"]),
                "main_grad": Result(ours["main_grad"]).errors(Result(wanted["main_grad"])),
                "parameters": Result(ours["parameters"]).errors(Result(wanted["parameters"])),
                "dtypes": ours["dtypes"],
                "left": ours["left"],
                "added": (sum(p.grad_added_to_main_grad for p in model.parameters()), direct),
                "fired": (ours["fired"], wanted["fired"]),
            }
        )
    return found


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return run_ranks(with_and_without, 2, timeout_s=280)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda i: " ".join(map(str, RUNS[i])))
def test_main_grads_and_optimizer_steps_are_megatrons(runs, number):
    for rank in runs:
        one = rank[number]
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-6)
        assert max(one["main_grad"].values()) < 2e-5
        assert max(one["parameters"].values()) < 1e-5
        assert one["dtypes"] == {torch.float32}
        assert one["left"] == 0  # Megatron's hook took every gradient
        added, direct = one["added"]
        assert added >= 3 * 6 if direct else added == 0  # four linears and two norms a layer


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda i: " ".join(map(str, RUNS[i])))
def test_each_parameter_is_ready_as_often_as_in_megatron(runs, number):
    for rank in runs:
        ours, wanted = rank[number]["fired"]
        for step in range(STEPS):
            assert sorted(ours[step]) == sorted(wanted[step])


def test_layer_regions_keep_the_order_of_reductions(runs):
    for number in (0, 2, 4):
        ours, wanted = (layers_and_syncs(events[-1]) for events in runs[0][number]["fired"])
        first, last = ours.index("sync"), len(ours) - 1 - ours[::-1].index("0")
        assert first < last  # a reduction starts while gradients are still computed
        layers = [e for e in ours if e.isdigit()]
        assert list(dict.fromkeys(layers)) == ["2", "1", "0"]
        assert ours.count("sync") == wanted.count("sync") > 2
