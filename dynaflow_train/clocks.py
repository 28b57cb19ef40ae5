"""Order and time: what may be issued next, what is known to be finished, what takes how long.

A stream runs its launches in order. A launch that waits for position `p` also knows everything that
`p` knew, transitively. Nothing else is known: two streams without a wait run in any order.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dynaflow_train.ir import Launch, Op, Plan, Region

ALL = -1  # in place of a micro-batch index: the op runs once for all of them
Clock = dict[str, int]

# Rates of a current data-centre GPU, per millisecond: they order ops where nothing was measured.
FLOPS_PER_MS, MEMORY_BYTES_PER_MS, LINK_BYTES_PER_MS = 4e11, 3e9, 1.5e8


class Clocks:
    """The clocks of one plan, kept for many questions."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = tuple(launches)

    @cached_property
    def known(self) -> tuple[Clock, ...]:
        """For each launch and stream: the last position there known to be complete at its start.

        A stream of which nothing is known is absent. On a launch's own stream it is the launch
        before it. Waits must point backwards (`check` refuses others).
        """
        clocks: list[Clock] = []
        latest: dict[str, int] = {}
        for position, launch in enumerate(self.launches):
            clock: Clock = {}
            own = latest.get(launch.stream)
            for source in launch.waits if own is None else (own, *launch.waits):
                _join(clock, self.launches[source].stream, source, clocks[source])
            clocks.append(clock)
            latest[launch.stream] = position
        return tuple(clocks)

    @cached_property
    def positions(self) -> Mapping[str, list[int]]:
        """The positions of each stream, in order."""
        found: dict[str, list[int]] = {}
        for position, launch in enumerate(self.launches):
            found.setdefault(launch.stream, []).append(position)
        return found

    def is_known(self, launch: int, at: int) -> bool:
        """Whether `launch` is known to be complete when the launch at position `at` starts."""
        return self.known[at].get(self.launches[launch].stream, -1) >= launch

    def first_known(self, launch: int, stream: str) -> int:
        """The first position on `stream` at whose start `launch` is known to be complete.

        The length of the plan if there is none: only the end of the plan tells.
        """
        positions = self.positions.get(stream, [])
        # What a stream knows only grows, so the first position is found by bisection.
        at = bisect_left(positions, True, key=lambda position: self.is_known(launch, position))
        return positions[at] if at < len(positions) else len(self.launches)


def place_waits(
    streams: Sequence[str], reads: Sequence[Collection[int]]
) -> tuple[tuple[int, ...], ...]:
    """The fewest waits under which every launch starts after all launches it reads from.

    Args:
        streams: the stream of each launch.
        reads: for each launch the earlier positions whose values it reads.
    """
    clocks: list[Clock] = []
    latest: dict[str, int] = {}
    waits: list[tuple[int, ...]] = []
    for position, stream in enumerate(streams):
        clock: Clock = {}
        if (own := latest.get(stream)) is not None:
            _join(clock, stream, own, clocks[own])
        chosen: list[int] = []
        # Latest first: a later launch may know an earlier one, never the other way round.
        for source in sorted(reads[position], reverse=True):
            if clock.get(streams[source], -1) < source:
                chosen.append(source)
                _join(clock, streams[source], source, clocks[source])
        clocks.append(clock)
        latest[stream] = position
        waits.append(tuple(reversed(chosen)))
    return tuple(waits)


def input_launches(plan: Plan, region: Region) -> tuple[frozenset[int], ...]:
    """For each launch the positions of the launches whose values it reads, itself left out.

    Raises:
        KeyError: an input was not issued before. `schedule.check` says so in words.
    """
    number = len(plan.sizes)
    issued: dict[tuple[str, int], int] = {}
    reads: list[frozenset[int]] = []
    for position, launch in enumerate(plan.launches):
        found: set[int] = set()
        for name in launch.ops:
            for source in region.predecessors[name]:
                parts = parts_read(region.op[name], region.op[source], launch, number)
                found.update(issued[source, part] for part in parts)
            issued.update({(name, part): position for part in launch.micro_batches})
        reads.append(frozenset(found - {position}))
    return tuple(reads)


def parts_read(op: Op, source: Op, launch: Launch, number: int) -> tuple[int, ...]:
    """The micro-batches of `source` that `op` reads in `launch`."""
    return tuple(range(number)) if op.merged or source.merged else launch.micro_batches


def _join(clock: Clock, stream: str, position: int, at_its_start: Clock) -> None:
    """Add to `clock` that `position` on `stream` is complete, and all that was known before it."""
    for name, last in at_its_start.items():
        if clock.get(name, -1) < last:
            clock[name] = last
    if clock.get(stream, -1) < position:
        clock[stream] = position


class Readiness:
    """Which runs have all inputs issued; kept up to date, never searched.

    A run is (index of the op, index of the micro-batch), or (index, ALL) for a merged op.
    """

    def __init__(self, region: Region, number: int) -> None:
        ops = region.ops
        place = {op.name: index for index, op in enumerate(ops)}
        self.number = number
        self.merged = [op.merged for op in ops]
        self.sources = [[place[name] for name in region.predecessors[op.name]] for op in ops]
        self.readers: list[list[int]] = [[] for _ in ops]
        self.missing: dict[tuple[int, int], int] = {}  # inputs not issued, for runs not issued
        for index, sources in enumerate(self.sources):
            for source in sources:
                self.readers[source].append(index)
            for part in self.parts(index):
                self.missing[index, part] = len(self.inputs((index, part)))
        self.ready = sorted(run for run, count in self.missing.items() if count == 0)

    def parts(self, index: int) -> Sequence[int]:
        """The micro-batches an op runs for."""
        return (ALL,) if self.merged[index] else range(self.number)

    def runs(self, index: int, part: int) -> list[tuple[int, int]]:
        """The runs of op `index` that belong to micro-batch `part` (all of them for `ALL`)."""
        if self.merged[index] or part == ALL:
            return [(index, each) for each in self.parts(index)]
        return [(index, part)]

    def inputs(self, run: tuple[int, int]) -> list[tuple[int, int]]:
        """The runs that `run` reads from."""
        return [each for source in self.sources[run[0]] for each in self.runs(source, run[1])]

    def reading(self, run: tuple[int, int]) -> list[tuple[int, int]]:
        """The runs that read from `run`."""
        return [each for reader in self.readers[run[0]] for each in self.runs(reader, run[1])]

    def after(self, chain: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The runs that would be ready, were these issued."""
        left = Counter(each for run in chain for each in self.reading(run))
        ready = [run for run, count in left.items() if self.missing.get(run) == count]
        return sorted(run for run in ready if run not in chain)

    def issue(self, run: tuple[int, int]) -> None:
        """Take `run` out and count it for its readers."""
        del self.missing[run]
        del self.ready[bisect_left(self.ready, run)]
        for key in self.reading(run):
            self.missing[key] -= 1
            if self.missing[key] == 0:
                insort(self.ready, key)


def estimate_ms(op: Op, times: Mapping[str, float]) -> float:
    """Milliseconds of `op` for the whole batch: measured if `times` has it, else from its size."""
    if op.name in times:
        return times[op.name]
    if op.is_communication:
        return op.bytes / LINK_BYTES_PER_MS
    return max(op.flops / FLOPS_PER_MS, op.bytes / MEMORY_BYTES_PER_MS)


def leads(region: Region, times: Mapping[str, float]) -> list[tuple[float, float]]:
    """For each op the way to the next collective, the first in region order that needs the op.

    Two estimates in milliseconds: the compute up to it, the op's own included, and its own length.
    Infinite compute and no collective where none needs the op.
    """
    place = {op.name: index for index, op in enumerate(region.ops)}
    found = [(math.inf, math.inf, 0.0)] * len(place)  # index of the collective, compute, its length
    for index, op in reversed(list(enumerate(region.ops))):
        following, compute, length = found[index]
        own = estimate_ms(op, times)
        if op.is_communication:
            found[index] = (index, 0.0, own)
        else:
            found[index] = (following, compute + own, length)
        for source in region.predecessors[op.name]:
            found[place[source]] = min(found[place[source]], found[index])
    return [(compute, length) for _, compute, length in found]
