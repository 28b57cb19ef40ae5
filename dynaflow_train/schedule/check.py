"""Refuses a plan that could compute something else than the plain run, or hang.

Every error is a ScheduleError that shows the plan with an arrow at the line.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from dynaflow_train.clocks import Clocks, input_launches, parts_read
from dynaflow_train.errors import ScheduleError
from dynaflow_train.schedule.text import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynaflow_train.ir import Launch, Op, Plan, Region


def check(plan: Plan, region: Region, batch: int | None = None, rank: int | None = None) -> None:
    """Refuse `plan` unless it runs `region` completely, once, in a legal order.

    Args:
        plan: as recorded, or loaded from text.
        region: what it is for.
        batch: samples of the whole batch, to compare the sizes with.
        rank: named in the message.

    Raises:
        ScheduleError: sizes do not fit; an op or micro-batch is unknown, missing, issued twice or
            before its inputs; micro-batches merged that are not adjacent; a wait is missing or does
            not point backwards.
    """
    for position, what in _problems(plan, region, batch):
        who = "" if rank is None else f"rank {rank}, "
        raise ScheduleError(
            f"{who}{region.name} {region.phase}, position {position}: {what}. "
            f"{_advice(plan)}\n{show(plan.launches, position)}"
        )


def check_collectives(plans: Mapping[int, Plan], region: Region) -> None:
    """Refuse plans, by rank, that issue the collectives of a process group in different orders.

    Raises:
        ScheduleError: names group, ranks and launch.
    """
    first = min(plans)
    for rank in sorted(plans):
        mine, theirs = (_collectives(plans[each], region) for each in (rank, first))
        for group in sorted({*mine, *theirs}):
            pairs = zip_longest(mine.get(group, ()), theirs.get(group, ()))
            for ours, other in pairs:
                if ours is None or other is None or ours[1] != other[1]:
                    launches = plans[rank].launches
                    raise ScheduleError(
                        f"rank {rank} issues {_named(ours)} on group {group} where rank {first} "
                        f"issues {_named(other)}; collectives need one order on all ranks. "
                        f"{_advice(plans[rank])}\n"
                        f"{show(launches, ours[0] if ours else len(launches), f'rank {rank}')}"
                    )


def _problems(plan: Plan, region: Region, batch: int | None) -> Iterator[tuple[int, str]]:
    """Position, and what is wrong there. Checks rely on those before: only the first counts."""
    yield from ((0, what) for what in _sizes(plan, region, batch))
    number = len(plan.sizes)
    issued: dict[tuple[str, int], int] = {}
    for position, launch in enumerate(plan.launches):
        yield from ((position, what) for what in _shape(launch, region, number))
        for name in launch.ops:
            found = _inputs(plan, region, launch, region.op[name], issued)
            yield from ((position, what) for what in found)
            issued.update({(name, part): position for part in launch.micro_batches})
    runs = [(op.name, part) for op in region.ops for part in range(number)]
    if lacking := [f"{name}[{part}]" for name, part in runs if (name, part) not in issued]:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        yield len(plan.launches), f"{', '.join(lacking[:3])}{more} is missing from the plan"
    yield from _waits(plan, region)


def _sizes(plan: Plan, region: Region, batch: int | None) -> Iterator[str]:
    sizes = plan.sizes
    if plan.phase != region.phase:
        yield f"a {plan.phase} plan was given to a {region.phase} region"
    if not sizes or min(sizes) < 0 or (len(sizes) > 1 and min(sizes) < 1):
        yield f"micro-batches of {list(sizes)} samples: each needs at least one"
    if batch is not None and sum(sizes) != batch:
        yield f"micro-batches of {list(sizes)} samples make {sum(sizes)}, the batch {batch}"
    if len(sizes) > 1 and not region.can_split:
        yield f"{len(sizes)} micro-batches of a region that cannot be cut: {region.why_not}"


def _shape(launch: Launch, region: Region, number: int) -> Iterator[str]:
    """The launch by itself: known ops, known micro-batches, what may be in one launch."""
    parts, shown = launch.micro_batches, " + ".join(launch.ops)
    for name in launch.ops:
        if name not in region.op:
            yield f"{name} is no op of {region.name} {region.phase}"
    if not launch.ops or not parts or not set(parts) <= set(range(number)):
        what = f"{shown or 'no op'} for micro-batches {list(parts)}"
        yield f"{what}; the plan has {number}, from 0 on"
    if parts != tuple(range(parts[0], parts[0] + len(parts))):
        yield f"{shown} merges micro-batches {list(parts)}, not adjacent"
    if len(launch.ops) > 1 and launch.kernel is None:
        yield f"{shown} are several ops without a kernel that replaces them"
    for name in launch.ops:
        if region.op[name].merged and len(parts) != number:
            yield f"{name} runs once for all {number} micro-batches, here for {list(parts)}"


def _inputs(
    plan: Plan, region: Region, launch: Launch, op: Op, issued: Mapping[tuple[str, int], int]
) -> Iterator[str]:
    """Issued once, and after everything it reads."""
    for part in launch.micro_batches:
        if (op.name, part) in issued:
            yield f"{op.name}[{part}] was issued before, at {issued[op.name, part]}"
    for source in region.predecessors[op.name]:
        for part in parts_read(op, region.op[source], launch, len(plan.sizes)):
            if (source, part) not in issued:
                later = [str(i) for i, each in enumerate(plan.launches) if source in each.ops]
                where = f"is at {', '.join(later)}" if later else "is missing"
                yield f"{op.name} runs before its input {source}[{part}], which {where}"


def _waits(plan: Plan, region: Region) -> Iterator[tuple[int, str]]:
    """Waits point backwards, and cover every value that crosses streams."""
    launches = plan.launches
    for position, launch in enumerate(launches):
        for wait in launch.waits:
            if not 0 <= wait < position:
                yield position, f"it waits for position {wait}, which does not come before it"
    clocks = Clocks(launches)
    for position, sources in enumerate(input_launches(plan, region)):
        for source in sorted(sources):
            if not clocks.is_known(source, position):
                reader, read = launches[position], launches[source]
                yield (
                    position,
                    f"{' + '.join(reader.ops)} on {reader.stream} reads {' + '.join(read.ops)} of "
                    f"position {source} on {read.stream} without a wait",
                )


def _collectives(plan: Plan, region: Region) -> dict[str, list[tuple[int, str]]]:
    """For each process group its collectives in issue order, with their positions."""
    found: dict[str, list[tuple[int, str]]] = {}
    for position, launch in enumerate(plan.launches):
        for name in launch.ops:
            op = region.op[name]
            if op.is_communication:
                parts = ",".join(map(str, launch.micro_batches))
                found.setdefault(op.group or "", []).append((position, f"{name}[{parts}]"))
    return found


def _named(entry: tuple[int, str] | None) -> str:
    return "nothing more" if entry is None else entry[1]


def _advice(plan: Plan) -> str:
    return f"This plan came from strategy {plan.strategy!r}; 'sequential' is always valid."
