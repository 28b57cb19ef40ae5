"""Draws random legal schedules for captured models and compares every gradient with the plain run.

    python -m tools.random_schedules --count 10000 --ranks 2

Sizes, order, merged runs and streams are drawn; all ranks draw alike. Prints the seed of a schedule
that is wrong, which `--first SEED --count 1` runs again.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from tests.engine.harness import AnySchedule, Oracle, Switch, batch, compiled, quiet
from tests.engine.parallel import PARALLEL
from tests.engine.stepping import step
from tests.engine.zoo import ALL, Case
from tests.ranks import run_ranks

BATCH = 5
MODELS = ("fg", "causal_lm")


def case_of(name: str) -> Case:
    """A parallel model, or one of the zoo."""
    return PARALLEL[name] if name in PARALLEL else ALL[name]


def run(rank: int, name: str, first: int, count: int, report_s: float = 60.0) -> int:
    """Run `count` schedules on this rank.

    Returns:
        The number of different plans that ran.

    Raises:
        AssertionError: a schedule is wrong; the message names its seed and the tensors.
    """
    case, switch = case_of(name), Switch()
    oracle, inputs, seen = Oracle(case, BATCH, torch.float32), batch(case, BATCH), set[int]()
    model = compiled(case, switch)
    last = time.monotonic()
    with quiet():
        for seed in range(first, first + count):
            strategy: Any = AnySchedule(seed)
            switch.use(strategy)
            oracle.check(step(model, inputs), f"{name}, seed {seed}")
            seen.add(hash(tuple(strategy.drawn)))
            if rank == 0 and time.monotonic() - last > report_s:
                last = time.monotonic()
                print(f"{name}: {seed - first + 1} of {count}", file=sys.stderr)
    return len(seen)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    for name in given.models:
        count = given.count // len(given.models)
        start = time.monotonic()
        plans = run_ranks(run, given.ranks, name, given.first, count, timeout_s=1e6)[0]
        took = time.monotonic() - start
        print(f"{name}: {count} schedules, {plans} different, all exact, {took:.0f} s")


if __name__ == "__main__":
    main()
