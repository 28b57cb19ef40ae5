"""What became of each collective: its milliseconds, how many were hidden, and why not all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynaflow_train.clocks import input_launches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynaflow_train.ir import Interval, Plan, Region

Span = tuple[float, float]
_NEGLIGIBLE = 0.05  # share of a collective that may stay exposed without a reason


@dataclass(frozen=True)
class Collective:
    """One launch of a collective.

    Attributes:
        launch: position in the plan.
        op: its name (the chain's names, where a kernel replaces several ops).
        micro_batches: which.
        ms: from start to the end of its transfer.
        hidden_ms: of these, beside compute on another stream.
        reason: why the rest is exposed; empty when (nearly) nothing is.
    """

    launch: int
    op: str
    micro_batches: tuple[int, ...]
    ms: float
    hidden_ms: float
    reason: str = ""

    @property
    def exposed_ms(self) -> float:
        """Milliseconds in which nothing else ran."""
        return self.ms - self.hidden_ms


@dataclass(frozen=True)
class Explanation:
    """One phase of one region: what its plan did to communication.

    Attributes:
        region, phase, strategy, sizes: of the plan.
        collectives: in issue order.
        wall_ms: from the first start to the last end.
        copied: bytes copied on top of what the unsplit run copies, by name of the value.
        uncut: why the strategy did not schedule this context, or "".
    """

    region: str
    phase: str
    strategy: str
    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    wall_ms: float
    copied: tuple[tuple[str, int], ...] = ()
    uncut: str = ""

    @property
    def ms(self) -> float:
        """Milliseconds of all collectives."""
        return sum(each.ms for each in self.collectives)

    @property
    def hidden_ms(self) -> float:
        """Of these, beside compute."""
        return sum(each.hidden_ms for each in self.collectives)

    @property
    def hidden_share(self) -> float:
        """Hidden share of the communication time, 0 to 1; 1 when there is none."""
        return self.hidden_ms / self.ms if self.ms > 0 else 1.0

    def __str__(self) -> str:
        head = (
            f"{self.region} {self.phase}: {self.strategy}, micro-batches {list(self.sizes)}, "
            f"{self.wall_ms:.3f} ms"
        )
        rows = [("collective", "micro-batch", "ms", "hidden", "exposed", "why exposed")]
        rows += [
            (
                each.op,
                ",".join(map(str, each.micro_batches)),
                f"{each.ms:.3f}",
                f"{each.hidden_ms:.3f}",
                f"{each.exposed_ms:.3f}",
                each.reason,
            )
            for each in self.collectives
        ]
        uncut = [f"it runs sequentially: {self.uncut}"] if self.uncut else []
        copied = ", ".join(f"{name} {size:,}" for name, size in self.copied) or "0"
        last = f"bytes copied: {copied}"
        if not self.collectives:
            return "\n".join([head, *uncut, "no collectives: nothing to hide", last])
        exposed = self.ms - self.hidden_ms
        total = (f"{self.ms:.3f}", f"{self.hidden_ms:.3f}", f"{exposed:.3f}")
        rows.append(("total", "", *total, f"{self.hidden_share:.0%} hidden"))
        return "\n".join([head, *uncut, *_table(rows), last])


def explain(
    plan: Plan,
    region: Region,
    intervals: Sequence[Interval],
    copied: Sequence[tuple[str, int]] = (),
) -> Explanation:
    """What `intervals`, measured or simulated, say about each collective of `plan`.

    Args:
        plan: what ran.
        region: its ops.
        intervals: one for each launch.
        copied: (name, bytes) of copies the unsplit run does not make.
    """
    exposed = exposed_spans(plan, region, intervals)
    why = _Why(plan, region)
    times = {each.launch: each.end_ms - each.start_ms for each in intervals}
    found: list[Collective] = []
    for position, spans in exposed.items():
        ms, left = times[position], sum(end - start for start, end in spans)
        launch = plan.launches[position]
        reason = why.exposed(position) if left > _NEGLIGIBLE * ms else ""
        name = " + ".join(launch.ops)
        found.append(Collective(position, name, launch.micro_batches, ms, ms - left, reason))
    end = max((each.end_ms for each in intervals), default=0.0)
    wall_ms = end - min((each.start_ms for each in intervals), default=0.0)
    return Explanation(
        plan.region, plan.phase, plan.strategy, plan.sizes, tuple(found), wall_ms, tuple(copied),
        plan.reason or "",
    )  # fmt: skip


def exposed_spans(
    plan: Plan, region: Region, intervals: Sequence[Interval]
) -> dict[int, tuple[Span, ...]]:
    """For each collective, by position, the stretches beside which no other stream computed."""
    computes, streams = _computes(plan, region), [launch.stream for launch in plan.launches]
    spans = {each.launch: (each.start_ms, each.end_ms) for each in intervals}
    busy = {
        stream: union(s for at, s in spans.items() if computes[at] and streams[at] != stream)
        for stream in plan.streams
    }
    return {
        at: gaps(span, busy[streams[at]]) for at, span in sorted(spans.items()) if not computes[at]
    }


def _computes(plan: Plan, region: Region) -> list[bool]:
    """For each launch whether it holds no collective."""
    return [
        not any(region.op[name].is_communication for name in launch.ops) for launch in plan.launches
    ]


class _Why:
    """Finds what kept a collective exposed: sets of launches as bits of an integer."""

    def __init__(self, plan: Plan, region: Region) -> None:
        self.plan = plan
        self.computes = _computes(plan, region)
        self.reads = input_launches(plan, region)
        self.before: list[int] = []  # all launches each one needs, itself included
        for position, sources in enumerate(self.reads):
            needed = 1 << position
            for source in sources:
                needed |= self.before[source]
            self.before.append(needed)

    def exposed(self, position: int) -> str:
        """One sentence on the collective at `position`."""
        launches, own = self.plan.launches, self.plan.launches[position]
        if self.plan.reason is not None:
            return f"sequential: {self.plan.reason}"
        elsewhere = [
            other
            for other, launch in enumerate(launches)
            if launch.stream != own.stream and self.computes[other]
        ]
        if not elsewhere:
            return f"sequential: all compute is on its stream, {own.stream!r}"
        later = [other for other in elsewhere if other > position]
        readers = [other for other in later if self.needs(other, position)]
        beside = [other for other in later if not readers or other < readers[0]]
        which = "first op of the region; " if not self.reads[position] else ""
        if all(self.computes[position + 1 :]):
            which += "last collective; "
        if beside:
            return f"{which}the compute beside it is shorter"
        if not readers:
            return f"{which}no compute follows"
        if not any(self.independent(other, position) for other in elsewhere):
            only = "only one micro-batch" if len(self.plan.sizes) == 1 else "a merged op"
            return f"{which}{only}: no compute is independent of it"
        reader = launches[readers[0]]
        parts = ",".join(map(str, reader.micro_batches))
        return (
            f"{which}nothing independent was ready: next is {' + '.join(reader.ops)}[{parts}], "
            f"which needs it"
        )

    def needs(self, later: int, earlier: int) -> bool:
        """Whether `later` reads what `earlier` made, directly or not."""
        return bool(self.before[later] >> earlier & 1)

    def independent(self, one: int, other: int) -> bool:
        """Whether neither needs the other."""
        return not self.needs(max(one, other), min(one, other))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def gaps(span: Span, busy: Sequence[Span]) -> tuple[Span, ...]:
    """The parts of `span` outside `busy`, which is disjoint and in order."""
    start, end = span
    found: list[Span] = []
    for busy_start, busy_end in busy:
        if busy_end <= start:
            continue
        if busy_start >= end:
            break
        if busy_start > start:
            found.append((start, busy_start))
        start = busy_end
    if start < end:
        found.append((start, end))
    return tuple(found)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = range(2, 5)
    return [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
