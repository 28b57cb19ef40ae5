"""Times steps: variants in turn, the slowest rank counted, the host never stopped in a round."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynaflow_train.benchmarks.figures import Phases
    from dynaflow_train.benchmarks.steps import Clock, PlainStep

Times = dict[str, list["Phases"]]


def in_turn(steps: Mapping[str, PlainStep], clock: Clock, rounds: int) -> Times:
    """`rounds` times one step of each: this rank's times.

    Ranks begin each step together, by a collective on the device; the host runs ahead, as it does
    in training. Whom a step follows is another in each round: one that leaves the chip cool lends
    its successor higher clocks.
    """
    times: Times = {name: [] for name in steps}
    together, names = torch.zeros(1, device=clock.device), list(steps)
    for place in range(rounds):
        stamps = {}
        for name in (names[i] for i in order(len(names), place)):
            dist.all_reduce(together)
            stamps[name] = steps[name]()
        for name, found in stamps.items():
            times[name].append(clock.phases(found))
    return times


def order(number: int, place: int) -> list[int]:
    """Whose turn it is in a round, of `number`: each follows each other equally often.

    E. J. Williams, Experimental designs balanced for the estimation of residual effects of
    treatments, 1949: balanced after `number` rounds, of an odd number after twice as many.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(number)]
    found = [(each + place) % number for each in zigzag]
    return found[::-1] if number % 2 and (place // number) % 2 else found


def slowest(ranks: Sequence[Times]) -> Times:
    """For each round the times of the rank whose step took longest."""
    return {
        name: [max(each, key=sum) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def cpu_ms(step: PlainStep, clock: Clock, repeats: int = 5) -> float | None:
    """Milliseconds until a step's launches are issued, from an idle device; None on the CPU.

    The CPU runs what it issues, so there is no such time.
    """
    if not clock.is_cuda:
        return None
    found: list[float] = []
    for _ in range(repeats):
        clock.finish()
        start = time.perf_counter()
        step()
        found.append((time.perf_counter() - start) * 1e3)
    clock.finish()
    return statistics.median(found)
