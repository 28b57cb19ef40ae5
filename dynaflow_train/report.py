"""What became of each collective: its milliseconds, how many were hidden, and why not all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """

    region: str
    phase: str
    strategy: str
    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...]
    wall_ms: float
    copied: tuple[tuple[str, int], ...] = ()

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
        exposed = self.ms - self.hidden_ms
        total = (f"{self.ms:.3f}", f"{self.hidden_ms:.3f}", f"{exposed:.3f}")
        rows.append(("total", "", *total, f"{self.hidden_share:.0%} hidden"))
        copied = ", ".join(f"{name} {size:,}" for name, size in self.copied) or "0"
        return "\n".join([head, *_table(rows), f"bytes copied: {copied}"])


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
    times = {each.launch: (each.start_ms, each.end_ms) for each in intervals}
    found = tuple(
        _collective(plan, region, times, position) for position in _communication(plan, region)
    )
    starts = [start for start, _ in times.values()]
    ends = [end for _, end in times.values()]
    wall_ms = max(ends, default=0.0) - min(starts, default=0.0)
    return Explanation(
        plan.region, plan.phase, plan.strategy, plan.sizes, found, wall_ms, tuple(copied)
    )


def exposed_spans(
    plan: Plan, region: Region, intervals: Sequence[Interval], launch: int
) -> tuple[Span, ...]:
    """The stretches of the collective at position `launch` beside which no other stream computed."""
    times = {each.launch: (each.start_ms, each.end_ms) for each in intervals}
    start, end = times[launch]
    spans: list[Span] = []
    for busy_start, busy_end in _busy(plan, region, times, plan.launches[launch].stream):
        if busy_start > start:
            spans.append((start, min(busy_start, end)))
        start = max(start, busy_end)
        if start >= end:
            break
    if start < end:
        spans.append((start, end))
    return tuple(span for span in spans if span[0] < span[1])


def _communication(plan: Plan, region: Region) -> list[int]:
    return [
        position
        for position, launch in enumerate(plan.launches)
        if any(region.op[name].is_communication for name in launch.ops)
    ]


def _busy(plan: Plan, region: Region, times: dict[int, Span], beside: str) -> list[Span]:
    """When any stream but `beside` computes, as disjoint spans in order."""
    communication = set(_communication(plan, region))
    merged: list[Span] = []
    for start, end in sorted(
        times[position]
        for position, launch in enumerate(plan.launches)
        if launch.stream != beside and position not in communication and position in times
    ):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
