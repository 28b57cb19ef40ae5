"""Collectives by copies out of the other ranks' memory, between processes that share it."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import dynaflow_train as df
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.execute import exchange
from dynaflow_train.execute.meta import Meta
from dynaflow_train.session import Session
from dynaflow_train.strategy import Strategy
from tests.engine.harness import Oracle, Switch, batch, compiled, quiet, step
from tests.engine.parallel import PARALLEL
from tests.engine.shared import SharedRings
from tests.engine.test_zoo import BATCH, STRATEGIES
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections import Counter

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
ROUNDS = 12

pytestmark = pytest.mark.dist


def group_result(kind: str, operand: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The process group's own."""
    wanted = operand.clone() if kind == "all_reduce" else torch.empty_like(out)
    if kind == "all_reduce":
        dist.all_reduce(wanted)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(wanted, operand)
    else:
        dist.reduce_scatter_tensor(wanted, operand)
    return wanted


def rounds(rank: int, cases: list[tuple[str, int, bool]]) -> list[int]:
    """For each case: of many collectives in turn how many came out wrong."""
    return [turns(rank, *case) for case in cases]


def turns(rank: int, kind: str, buffers: int, meeting: bool) -> int:
    """The last rank is always late."""
    world = dist.get_world_size()
    shapes = {"all_reduce": (5, 7), "all_gather": (4, 3), "reduce_scatter": (4 * world, 3)}
    outs = {"all_reduce": (5, 7), "all_gather": (4 * world, 3), "reduce_scatter": (4, 3)}
    rings = SharedRings()
    ring = rings.connect("", "comm", buffers, 512)
    slow = rank == world - 1
    original = ring.buffers

    def meet() -> None:
        if meeting:
            rings.meet()
        time.sleep(0.02 * slow)  # the others are far ahead when it pulls

    object.__setattr__(ring, "meet", meet)
    assert ring.buffers is original
    wanted, found = [], []
    for number in range(ROUNDS):
        generator = torch.Generator().manual_seed(100 * number + rank)
        operand = torch.randint(-50, 50, shapes[kind], generator=generator).float()
        out = torch.full(outs[kind], torch.nan)
        wanted.append((operand, out))
        buffer = number % buffers
        last = number == ROUNDS - 1
        launch = ring.collective(kind, buffer, Meta.of(operand), last=last)
        ring.view(rank, buffer, Meta.of(operand)).copy_(operand)
        launch(operand, out, False)
        found.append(out)
    dist.barrier()
    right = [group_result(kind, operand, out) for operand, out in wanted]
    return sum(not torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_they_equal_the_process_group_with_a_late_rank(world):
    """Whole numbers: sums are exact in any order."""
    for wrong in run_ranks(rounds, world, [(kind, 2, True) for kind in KINDS]):
        assert wrong == [0] * len(KINDS)


def test_without_meeting_or_with_one_buffer_they_would_be_wrong():
    cases = [("all_reduce", 2, False), ("all_reduce", 1, True)]
    unmet, alone = zip(*run_ranks(rounds, 2, cases), strict=True)
    assert max(unmet) > 0
    assert max(alone) > 0


def every_strategy(rank: int, name: str, region: str) -> tuple[int, int, int, Counter]:
    """Meetings, rings, copies of what is exchanged, and kinds of exchanges, over all strategies."""
    case, switch, dtype = PARALLEL[name], Switch(), torch.float32
    oracle, inputs = Oracle(case, BATCH, dtype), batch(case, BATCH, dtype)
    rings = SharedRings(late_s=0.002 * rank, chunks=3)
    Session.connector = lambda session, device: rings.connect  # this process runs nothing else
    model = compiled(case, switch, dtype, region=region)
    for label, strategy in STRATEGIES.items():
        switch.use(strategy)
        with quiet():
            oracle.check(step(model, inputs), f"{name} {label}")
    used = df.plans(model)
    moved = {v for u in used for op in u.region.ops if op.collective for v in op.inputs}
    plain = [u for u in used if u.plan.sizes in {(4,), (2, 2)}]
    assert len({u.plan.sizes for u in plain}) == 2
    copied = sum(n for u in plain for v, n in u.copies.items() if v in moved)
    return rings.meetings, len(rings.made), copied, rings.asked


@pytest.mark.parametrize(("name", "region"), [("fg", "model"), ("sp", "layer")])
def test_every_strategy_is_exact(name, region):
    """Matrix products write where the others read: all-reduces copy nothing."""
    for meetings, rings, copied, asked in run_ranks(every_strategy, 2, name, region):
        assert meetings > rings > 0
        if name == "fg":
            assert copied == 0
            assert set(asked) == {"pull", "all_reduce", "in chunks"}
            assert asked["pull"] > asked["all_reduce"]  # whose sums one op reads, which adds


class LateReaders(Strategy):
    """All collectives there are before anything that does not lead to one by itself."""

    def schedule(self, s):
        s.split(None if s.context.forward_sizes else 4)
        while ready := s.get_ready_ops():
            s.execute(max(ready, key=lambda op: (op.is_communication, op.kind == "compute")))


def late_readers(rank: int, kept: bool) -> tuple[str, int]:
    """What is wrong with a step whose sums are read late, and the buffers of its rings."""
    case, switch = PARALLEL["fg"], Switch()
    oracle, inputs = Oracle(case, BATCH, torch.float32), batch(case, BATCH, torch.float32)
    rings = SharedRings(late_s=0.002 * rank)
    Session.connector = lambda session, device: rings.connect
    if not kept:
        exchange._depth = lambda launches, readers, written: 2
    model = compiled(case, switch, torch.float32)
    switch.use(LateReaders())
    with quiet():
        found = step(model, inputs)
    try:
        oracle.check(found)
    except AssertionError as error:
        return str(error), 2
    return "", max(ring.buffers[0].shape[0] for ring in rings.made)


def test_an_operand_stays_until_its_reader_has_added_it():
    for wrong, buffers in run_ranks(late_readers, 2, True):
        assert wrong == ""
        assert buffers > 2
    assert any(wrong for wrong, _ in run_ranks(late_readers, 2, False))


def on_the_cpu(rank: int) -> tuple[list[str], str, str]:
    """What is warned of, explained and raised where there is no copy engine."""
    del rank
    case, inputs = PARALLEL["fg"], batch(PARALLEL["fg"], BATCH, torch.float32)
    oracle = Oracle(case, BATCH, torch.float32)
    model = compiled(case, Switch(), torch.float32, transfer="copy_engine")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            oracle.check(step(model, inputs), "fg")
    reasons = [str(w.message) for w in told if "copied" in str(w.message)]
    strict = compiled(case, Switch(), torch.float32, transfer="copy_engine", strict=True)
    with pytest.raises(UnsupportedError) as raised:
        step(strict, inputs)
    return reasons, str(df.explain(model)), str(raised.value)


def test_without_a_gpu_it_is_refused_once_and_explained():
    for reasons, explained, raised in run_ranks(on_the_cpu, 2):
        assert len(reasons) == 1
        for text in (reasons[0], explained, raised):
            assert "the copy engine needs CUDA, the model is on cpu" in text
