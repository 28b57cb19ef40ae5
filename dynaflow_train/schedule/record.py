"""Runs a strategy against a region's symbolic ops and returns the plan: waits placed, checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynaflow_train.clocks import input_launches, place_waits
from dynaflow_train.errors import KernelError, ScheduleError, SplitError
from dynaflow_train.ir import Plan
from dynaflow_train.schedule.check import check
from dynaflow_train.schedule.text import show
from dynaflow_train.strategy import Scheduler

if TYPE_CHECKING:
    from collections.abc import Collection

    from dynaflow_train.ir import Op, Region
    from dynaflow_train.strategy import Context, Strategy


def record(
    strategy: Strategy,
    region: Region,
    context: Context,
    kernels: Collection[str] = (),
    *,
    strict: bool = True,
) -> Plan:
    """The plan that `strategy` makes for `region` in `context`.

    Args:
        strategy: whose `schedule` is called, once.
        region: the ops to issue.
        context: what the strategy may look at.
        kernels: names that `execute(kernel=...)` may ask for.
        strict: raise SplitError where a batch cannot be cut, wholly or at an op that mixes samples;
            else such a batch gives a sequential plan whose reason says why, and such an op runs
            merged.

    Raises:
        ScheduleError: the strategy issued something illegal, left ops out or raised; the message
            shows the plan so far with an arrow.
        SplitError, KernelError: as `Scheduler.split` and `Scheduler.execute` say.
    """
    s = Scheduler(region, context, kernels)
    try:
        _run(strategy, s, region)
    except _CannotCutError as error:
        s = _sequential(region, context, str(error))
    except SplitError as error:
        if strict:
            raise
        s = _sequential(region, context, str(error))
    if strict:
        _insist(s, region)
    plan = Plan(strategy.name, region.name, region.phase, s.sizes, tuple(s.launches), s.reason)
    waits = place_waits([launch.stream for launch in plan.launches], input_launches(plan, region))
    launches = tuple(
        dataclasses.replace(launch, waits=found)
        for launch, found in zip(plan.launches, waits, strict=True)
    )
    plan = dataclasses.replace(plan, launches=launches)
    check(plan, region, context.batch)
    return plan


class _CannotCutError(SplitError):
    """`first, second = s.split(2)` met a region that cannot be cut."""


def _insist(s: Scheduler, region: Region) -> None:
    """Nothing may run uncut that was to be cut."""
    advice = "Leave strict off to run it uncut, or take it out of the region."
    if s.refused is not None:
        raise SplitError(f"{region.name} {region.phase}, strict: {s.refused}. {advice}")
    if len(s.sizes) > 1 and (mixing := _mixing(region)):
        more = f" (and {len(mixing) - 1} more)" if len(mixing) > 1 else ""
        raise SplitError(
            f"{region.name} {region.phase}, strict: {mixing[0].name}{more} would run merged for "
            f"all {len(s.sizes)} micro-batches: {mixing[0].reason}. {advice}"
        )


def _mixing(region: Region) -> list[Op]:
    """Ops that mix samples on the samples' way: statistics beside it make no micro-batch wait."""
    samples = {name for name, value in region.values.items() if value.sharing in ("batch", "rows")}
    own = [op.name for op in region.ops if not op.merged and samples.intersection(op.outputs)]
    behind, ahead = set(own), set(own)
    for op in region.ops:
        behind.update([] if behind.isdisjoint(region.predecessors[op.name]) else [op.name])
    for op in reversed(region.ops):
        ahead.update(region.predecessors[op.name] if op.name in ahead else [])
    mixing = [op for op in region.ops if op.merged and op.reason and op.name in ahead]
    return [op for op in mixing if op.name in behind or samples.intersection(op.inputs)]


def _sequential(region: Region, context: Context, reason: str) -> Scheduler:
    s = Scheduler(region, context)
    s.sequential(reason)
    return s


def _run(strategy: Strategy, s: Scheduler, region: Region) -> None:
    """Call `schedule` and see that it issued everything."""
    name = strategy.name
    where = f"strategy {name!r}, {region.name} {region.phase}"
    advice = "'sequential' is always valid."
    try:
        strategy.schedule(s)
    except (SplitError, KernelError):
        raise
    except ScheduleError as error:
        shown = show(s.launches, len(s.launches))
        raise ScheduleError(f"{where}: {error} {advice}\n{shown}") from None
    except Exception as error:
        if isinstance(error, ValueError) and s.reason is not None and "unpack" in str(error):
            raise _CannotCutError(s.reason) from error
        raise ScheduleError(
            f"{where} raised {type(error).__name__}: {error}, after {len(s.launches)} launches. "
            f"{advice}\n{show(s.launches, len(s.launches), 'raised here')}"
        ) from error
    if ready := s.get_ready_ops():
        raise ScheduleError(
            f"{where} ended with {s.remaining} runs not issued; ready were "
            f"{', '.join(map(str, ready[:5]))}. Loop until s.get_ready_ops() is empty, or call "
            f"s.sequential(). {advice}\n{show(s.launches, len(s.launches), 'ended here')}"
        )
