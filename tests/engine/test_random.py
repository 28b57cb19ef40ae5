"""Random schedules: the legal ones are exact, the illegal ones refused before anything runs."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.errors import DynaFlowError, ScheduleError, SplitError
from dynaflow_train.strategy import Strategy
from tests.engine.harness import Cut, Oracle, Switch, batch, compiled, quiet, sizes_for
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT
from tests.ranks import run_ranks
from tools.random_schedules import run


@pytest.mark.dist
@pytest.mark.parametrize(("name", "count"), [("fg", 400), ("causal_lm", 100)])
def test_random_legal_schedules_are_exact(name, count):
    (different,) = run_ranks(run, 1, name, 0, count)
    assert different > 0.9 * count


@pytest.mark.dist
@pytest.mark.parametrize("name", ["fg", "sp", "gathered_head", "gathered_rows"])
def test_random_legal_schedules_on_two_ranks_are_exact(name):
    assert run_ranks(run, 2, name, 10_000, 25)[0] > 10


class Illegal(Strategy):
    """Legal but for one thing, at a random place."""

    def __init__(self, seed: int, sin: str, phase: str) -> None:
        for name, value in (("seed", seed), ("sin", sin), ("wrong", phase)):
            object.__setattr__(self, name, value)

    def schedule(self, s):
        pick = random.Random(self.seed)
        sinful = s.context.phase == self.wrong
        if s.context.forward_sizes is None:
            s.split(sizes_for(s.context.batch, pick))
        elif sinful and self.sin == "another split":
            s.split([1] * s.context.batch if len(s.context.forward_sizes) == 1 else 1)
        else:
            s.split()
        at = pick.randrange(s.remaining // 2, s.remaining)
        while ready := s.get_ready_ops():
            if sinful and s.remaining <= at and self.sin != "another split":
                return self.commit(s, pick.choice(ready), pick)
            s.execute(pick.choice(ready))
        return None

    def commit(self, s, op, pick):
        if self.sin == "twice":
            s.execute(op)
            s.execute(op)
        if self.sin == "too early":
            s.execute(pick.choice([r for each in s.get_ready_ops() for r in s.readers(each)]))
        if self.sin == "unknown kernel":
            s.execute(op, kernel="no_such_kernel")
        if self.sin == "split again":
            s.split(1)
        if self.sin == "foreign":
            s.execute(dataclasses.replace(op, op=f"{op.op}.twin"))


SINS = {
    "left out": "ended with .* not issued",
    "twice": "was issued before, at position",
    "too early": "is not ready: it reads",
    "unknown kernel": "no kernel 'no_such_kernel'",
    "split again": "split was called",
    "foreign": "is no op of",
    "another split": "ran with micro-batches of|cannot",
}


@pytest.mark.parametrize("sin", SINS)
def test_random_illegal_schedules_are_refused_and_leave_nothing_behind(sin):
    case, switch = SPLIT["block"], Switch(df.SplitModule("norm?|qkv|out|mlp*"))
    oracle, inputs = Oracle(case, 4, torch.float32), batch(case, 4)
    model = compiled(case, switch, strict=True)
    for seed in range(12):
        phase = "backward" if seed % 2 or sin == "another split" else "forward"
        switch.use(Illegal(seed, sin, phase))
        with quiet(), pytest.raises(DynaFlowError, match=SINS[sin]) as caught:
            step(model, inputs)
        if not isinstance(caught.value, SplitError) and sin != "unknown kernel":
            assert isinstance(caught.value, ScheduleError)
            assert "'sequential' is always valid" in str(caught.value)
        switch.use(Cut(2))
        oracle.check(step(model, inputs), f"after seed {seed}")
