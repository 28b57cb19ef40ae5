"""Wgrads added to main_grad as they are computed: what they come to, and who is told."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.megatron.models import Case
from tests.ranks import run_ranks

if TYPE_CHECKING:
    import torch

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

RUNS = [  # what it is compared with: our own run by autograd, Megatron's
    (Case(), "sequential", "apart"),
    (Case(bf16=True, sequence_parallel=True), "dual_batch", "host"),
]
WGRADS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


def accumulated(ddp: Any, micro_steps: int) -> Any:
    """The main_grads of a step of several micro-steps."""
    from tests.engine.stepping import Result
    from tests.megatron import models

    ddp.zero_grad_buffer()
    for number in range(micro_steps):
        last = number == micro_steps - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(**models.batch(number)).mean().backward()
    ddp.finish_grad_sync()
    return Result({n: p.main_grad.clone() for n, p in ddp.module.named_parameters()})


def share_in_bf16(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """How many of the numbers bf16 can hold."""
    return {n: float((t == t.bfloat16()).float().mean()) for n, t in tensors.items()}


def exactly(case: Case, weights: dict[str, Any], micro_steps: int) -> Any:
    """The same in fp64, from the same weights."""
    import dataclasses

    from tests.engine.stepping import Result
    from tests.megatron import models

    model = models.build(dataclasses.replace(case, bf16=False))
    model.load_state_dict(weights)
    model.double()
    found: dict[str, torch.Tensor] = {}
    for number in range(micro_steps):
        for name, gradient in models.step(model, models.batch(number)).items():
            found[name] = found.get(name, 0) + gradient
    found.pop("loss")
    return Result(found)


def with_and_without(rank: int) -> list[dict[str, Any]]:
    del rank
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from dynaflow_train.integrations import megatron
    from tests.megatron import models

    def wrapped(model: Any) -> Any:
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        return DistributedDataParallel(model.config, config, model)

    found = []
    for case, strategy, against in RUNS:
        models.start(case)
        with megatron.apply(attention_kind="host"):
            other, ours = models.build(case), models.build(case)
            truth = exactly(case, ours.state_dict(), 2)
            options = {"region": "layer", "executor": "eager", "strict": True}
            if against == "apart":
                megatron.compile(other, strategy, **options)
            megatron.compile(ours, strategy, into_main_grad=True, **options)
            both = wrapped(ours), wrapped(other)
            first, their_first = (accumulated(each, 1) for each in both)
            found.append(
                {
                    "first": {k: e for k, e in first.errors(their_first).items() if e},
                    "fits": tuple(share_in_bf16(each.tensors) for each in (first, their_first)),
                    "errors": tuple(accumulated(each, 2).errors(truth) for each in both),
                    "told": [n for n, p in ours.named_parameters() if p.grad_added_to_main_grad],
                    "theirs": [n for n, p in other.named_parameters() if p.grad_added_to_main_grad],
                    "left": [n for n, p in ours.named_parameters() if p.grad is not None],
                    "pointers": _gradients_given(both[0]),
                }
            )
        models.stop()
    return found


def _gradients_given(ddp: Any) -> tuple[int, int]:
    """How many memories autograd is given for the layers' linears, and for how many of them."""
    from tests.megatron import models

    seen: dict[str, int] = {}
    handles = [
        p.register_hook(lambda grad, n=n: seen.__setitem__(n, grad.data_ptr()))
        for n, p in ddp.module.named_parameters()
        if n.endswith(WGRADS)
    ]
    ddp.zero_grad_buffer()
    ddp(**models.batch()).mean().backward()
    for handle in handles:
        handle.remove()
    return len(set(seen.values())), len(seen)


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return run_ranks(with_and_without, 2, timeout_s=280)


def test_the_hook_is_told_and_gets_memory_that_all_share(runs):
    for one in (one for rank in runs for one in rank):
        linears = [n for n in one["errors"][0] if n.endswith(WGRADS)]
        assert len(linears) == 8
        assert set(linears) <= set(one["told"])
        assert not any("embedding" in name or "output_layer" in name for name in one["told"])
        assert one["theirs"] == []
        assert one["left"] == []
        memories, given = one["pointers"]
        assert given == len(linears)
        assert memories <= 4  # two layers of four shapes at most


def test_in_fp32_the_first_micro_step_has_the_bits_of_a_gradient_that_is_added_later(runs):
    for fp32, _ in runs:
        assert fp32["first"] == {}  # 0 + x is x
        assert max(fp32["errors"][0].values()) < 1e-6


def test_no_wgrad_is_rounded_to_bf16(runs):
    for _, bf16 in runs:
        ours, host = ({n: e for n, e in es.items() if n.endswith(WGRADS)} for es in bf16["errors"])
        assert sum(ours.values()) < sum(host.values())
        ours, host = (sum(each[n] for n in ours) / len(ours) for each in bf16["fits"])
        assert host == 1  # one micro-step's sum is the gradient, which was bf16
        assert ours < 0.1
        assert max(bf16["errors"][0].values()) < 2 * max(bf16["errors"][1].values())
