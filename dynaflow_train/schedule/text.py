"""Plan <-> text: one aligned line a launch, readable, diffable, and loading back to an equal plan.

strategy dual_batch
region   model
phase    forward
sizes    2 2
   0  compute  0    layers.0.self_attn
   1  comm     0    layers.0.self_attn.all_reduce                    after 0
   2  compute  0,1  layers.0.mlp + layers.0.norm   kernel mlp_norm   after 1
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, unquote

from dynaflow_train.errors import ScheduleError
from dynaflow_train.ir import Launch, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.ir import Phase, Region

_SHOWN = 12  # lines printed before and after the arrow
_LAUNCH = re.compile(
    r"\s*\d+  (?P<stream>\S+) +(?P<parts>[\d,]+) +(?P<ops>\S+(?: \+ \S+)*)"
    r"(?: +kernel (?P<kernel>\S+))?(?: +after (?P<waits>[\d,]+))?\s*"
)


def dumps(plan: Plan) -> str:
    """The plan as text; `loads` gives an equal plan back."""
    reason: list[str] = []
    if plan.reason is not None:
        blank = " " if plan.reason == plan.reason.strip() else ""  # a line's ends are stripped
        reason = [f"reason   {_quoted(plan.reason, blank + ',;:()=<>')}"]
    header = [
        f"strategy {_quoted(plan.strategy)}",
        f"region   {_quoted(plan.region)}",
        f"phase    {plan.phase}",
        f"sizes    {' '.join(map(str, plan.sizes))}",
    ]
    return "\n".join([*header, *reason, *lines(plan.launches)]) + "\n"


def loads(text: str) -> Plan:
    """The plan that `dumps` wrote.

    Raises:
        ScheduleError: a line cannot be read; the message holds it.
    """
    header: dict[str, str] = {}
    launches: list[Launch] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line[:1].isalpha():
            key, _, value = line.partition(" ")
            header[key] = value.strip()
        elif found := _LAUNCH.fullmatch(line):
            launches.append(_launch(found))
        elif line.strip():
            raise ScheduleError(f"line {number} of a plan's text cannot be read: {line!r}")
    if lacking := {"strategy", "region", "phase", "sizes"} - header.keys():
        raise ScheduleError(f"a plan's text lacks its header line(s) {', '.join(sorted(lacking))}")
    return Plan(
        strategy=unquote(header["strategy"]),
        region=unquote(header["region"]),
        phase=cast("Phase", header["phase"]),
        sizes=_numbers(header["sizes"].replace(" ", ",")),
        launches=tuple(launches),
        reason=unquote(header["reason"]) if "reason" in header else None,
    )


def lines(launches: Sequence[Launch]) -> list[str]:
    """One aligned line for each launch."""
    rows = [
        (
            _quoted(launch.stream),
            ",".join(map(str, launch.micro_batches)),
            " + ".join(_quoted(name) for name in launch.ops),
            f"kernel {_quoted(launch.kernel)}" if launch.kernel is not None else "",
            f"after {','.join(map(str, launch.waits))}" if launch.waits else "",
        )
        for launch in launches
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return [
        f"{position:>4}  {'  '.join(map(str.ljust, row, [*widths, 0]))}".rstrip()
        for position, row in enumerate(rows)
    ]


def show(launches: Sequence[Launch], arrow: int | None = None, why: str = "here") -> str:
    """The launches with `<-- why` at position `arrow`; at their count, on a line of its own.

    Long plans are shown around the arrow only.
    """
    shown = lines(launches)
    if arrow is None:
        return "\n".join(shown)
    if arrow >= len(shown):
        shown.append(f"{len(shown):>4}  ...")
    width = min(max(map(len, shown[max(arrow - _SHOWN, 0) : arrow + _SHOWN])), 100)
    shown[arrow] = f"{shown[arrow]:<{width}}  <-- {why}"
    first, last = max(arrow - _SHOWN, 0), min(arrow + _SHOWN + 1, len(shown))
    before = [f"      ({first} launches before)"] if first else []
    after = [f"      ({len(shown) - last} launches after)"] if last < len(shown) else []
    return "\n".join([*before, *shown[first:last], *after])


def plan_hash(plan: Plan, region: Region) -> str:
    """What ranks compare: SHA-256 over the plan's text and the region's fingerprint."""
    return hashlib.sha256(f"{dumps(plan)}{region.fingerprint}".encode()).hexdigest()


def _launch(found: re.Match[str]) -> Launch:
    kernel = found["kernel"]
    return Launch(
        ops=tuple(unquote(name) for name in found["ops"].split(" + ")),
        micro_batches=_numbers(found["parts"]),
        stream=unquote(found["stream"]),
        kernel=None if kernel is None else unquote(kernel),
        waits=_numbers(found["waits"] or ""),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _quoted(text: str, also_safe: str = "") -> str:
    """Percent-encoded where a character would break a line; names of modules stay as they are."""
    return quote(text, safe="/[]@:" + also_safe)
