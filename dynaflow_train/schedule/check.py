"""Refuses a plan that could compute something else than the plain run, or hang.

Every error is a ScheduleError that shows the plan with an arrow at the line.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NoReturn

from dynaflow_train.clocks import Clocks, input_launches, parts_read
from dynaflow_train.errors import ScheduleError
from dynaflow_train.schedule.text import show

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    _Checker(plan, region, rank).run(batch)


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


class _Checker:
    def __init__(self, plan: Plan, region: Region, rank: int | None) -> None:
        self.plan, self.region, self.rank = plan, region, rank
        self.number = len(plan.sizes)
        self.issued: dict[tuple[str, int], int] = {}

    def run(self, batch: int | None) -> None:
        self.sizes(batch)
        for position, launch in enumerate(self.plan.launches):
            self.shape(position, launch)
            for name in launch.ops:
                self.inputs(position, launch, self.region.op[name])
                self.issued.update({(name, part): position for part in launch.micro_batches})
        lacking = [
            f"{op.name}[{part}]"
            for op in self.region.ops
            for part in range(self.number)
            if (op.name, part) not in self.issued
        ]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            self.refuse(
                len(self.plan.launches), f"{', '.join(lacking[:3])}{more} is missing from the plan"
            )
        self.waits()

    def sizes(self, batch: int | None) -> None:
        sizes, region = self.plan.sizes, self.region
        if self.plan.phase != region.phase:
            self.refuse(0, f"a {self.plan.phase} plan was given to a {region.phase} region")
        if not sizes or min(sizes) < 0 or (len(sizes) > 1 and min(sizes) < 1):
            self.refuse(0, f"micro-batches of {list(sizes)} samples: each needs at least one")
        if batch is not None and sum(sizes) != batch:
            self.refuse(
                0, f"micro-batches of {list(sizes)} samples make {sum(sizes)}, the batch {batch}"
            )
        if len(sizes) > 1 and not region.can_split:
            self.refuse(
                0, f"{len(sizes)} micro-batches of a region that cannot be cut: {region.why_not}"
            )

    def shape(self, position: int, launch: Launch) -> None:
        """The launch by itself: known ops, known micro-batches, what may be in one launch."""
        parts, shown = launch.micro_batches, " + ".join(launch.ops)
        for name in launch.ops:
            if name not in self.region.op:
                self.refuse(position, f"{name} is no op of {self.region.name} {self.region.phase}")
        if not launch.ops or not parts or not set(parts) <= set(range(self.number)):
            self.refuse(
                position,
                f"{shown or 'no op'} for micro-batches {list(parts)}; the plan has "
                f"{self.number}, from 0 on",
            )
        if parts != tuple(range(parts[0], parts[0] + len(parts))):
            self.refuse(position, f"{shown} merges micro-batches {list(parts)}, not adjacent")
        if len(launch.ops) > 1 and launch.kernel is None:
            self.refuse(position, f"{shown} are several ops without a kernel that replaces them")
        for name in launch.ops:
            if self.region.op[name].merged and len(parts) != self.number:
                self.refuse(
                    position,
                    f"{name} runs once for all {self.number} micro-batches, here for {list(parts)}",
                )

    def inputs(self, position: int, launch: Launch, op: Op) -> None:
        """Issued once, and after everything it reads."""
        for part in launch.micro_batches:
            if (op.name, part) in self.issued:
                before = self.issued[op.name, part]
                self.refuse(position, f"{op.name}[{part}] was issued before, at {before}")
        for source in self.region.predecessors[op.name]:
            for part in parts_read(op, self.region.op[source], launch, self.number):
                if (source, part) not in self.issued:
                    self.refuse(
                        position,
                        f"{op.name} runs before its input {source}[{part}]{self.later(source)}",
                    )

    def later(self, name: str) -> str:
        found = [i for i, launch in enumerate(self.plan.launches) if name in launch.ops]
        return f", which is at {', '.join(map(str, found))}" if found else ", which is missing"

    def waits(self) -> None:
        """Waits point backwards, and cover every value that crosses streams."""
        launches = self.plan.launches
        for position, launch in enumerate(launches):
            for wait in launch.waits:
                if not 0 <= wait < position:
                    self.refuse(
                        position, f"it waits for position {wait}, which does not come before it"
                    )
        clocks = Clocks(launches)
        for position, sources in enumerate(input_launches(self.plan, self.region)):
            for source in sorted(sources):
                if not clocks.is_known(source, position):
                    self.refuse(
                        position,
                        f"{' + '.join(launches[position].ops)} on {launches[position].stream} "
                        f"reads {' + '.join(launches[source].ops)} of position {source} on "
                        f"{launches[source].stream} without a wait",
                    )

    def refuse(self, position: int, what: str) -> NoReturn:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        raise ScheduleError(
            f"{rank}{self.region.name} {self.region.phase}, position {position}: {what}. "
            f"{_advice(self.plan)}\n{show(self.plan.launches, position)}"
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
