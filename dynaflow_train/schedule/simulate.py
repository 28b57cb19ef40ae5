"""A dry run: when each launch of a plan would run, from times per op. No device needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynaflow_train.clocks import estimate_ms
from dynaflow_train.ir import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynaflow_train.ir import Plan, Region


def simulate(
    plan: Plan, region: Region, times: Mapping[str, float] | None = None
) -> tuple[Interval, ...]:
    """Each stream runs its launches in order, each as soon as what it waits for has ended.

    Args:
        plan: a checked plan.
        region: its ops.
        times: milliseconds of an op for the whole batch, by name; ops without are estimated from
            their flops and bytes. A micro-batch takes its share of the samples.
    """
    known = times or {}
    batch = max(sum(plan.sizes), 1)
    free: dict[str, float] = {}
    intervals: list[Interval] = []
    for position, launch in enumerate(plan.launches):
        share = sum(plan.sizes[part] for part in launch.micro_batches) / batch
        whole = sum(estimate_ms(region.op[name], known) for name in launch.ops)
        start = max(
            [free.get(launch.stream, 0.0), *(intervals[wait].end_ms for wait in launch.waits)]
        )
        intervals.append(Interval(position, start, start + whole * share))
        free[launch.stream] = start + whole * share
    return tuple(intervals)
