"""From raw times to rows, tables and files."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaflow_train.benchmarks import figures
from dynaflow_train.benchmarks.job import SINGLE
from dynaflow_train.benchmarks.timing import slowest
from dynaflow_train.benchmarks.variants import ABLATION, EAGER, UNCUT, bare_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MIB = 2**20
NOT_SLOWER = 0.99  # of the best baseline's speed
ALONE = "one rank: collectives over a group of one, no communication is measured; H, E are n/a"
COSTS = ("cpu_ms", "startup_s", "recorded_ms", "graph_mib", "peak_mib", "extra_copied_mib")
Row = dict[str, Any]

SHOWN = {  # column of a printed table -> its width
    "variant": 30, "ms": 9, "speedup": 8, "lower_bound": 11, "H": 7, "E": 7, "hidden_share": 12,
    "cpu_ms": 8, "peak_mib": 9, "extra_copied_mib": 16, "startup_s": 9, "startup_ratio": 13,
    "gradient_error": 14,
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A case on a link.

    Attributes:
        connections: CUDA_DEVICE_MAX_CONNECTIONS, None where it was not set.
        base: the best baseline. without: its step without collectives.
        limit_ms: what no order of this work can beat.
        rows: one a variant; those that did not run say why.
        ablation: what was turned off and what that did.
    """

    case: str
    link: str
    connections: str | None
    base: str
    without: str
    limit_ms: float
    rows: list[Row]
    ablation: list[Row]

    @property
    def place(self) -> str:
        """Link and connections, for a title."""
        return self.link + (f", {self.connections} connections" if self.connections else "")

    @property
    def best(self) -> Row | None:
        """Our fastest."""
        ran = [row for row in self.rows if row["kind"] == "ours" and row["ms"] is not None]
        return min(ran, key=lambda row: row["ms"], default=None)


def judge(result: Mapping[str, Any]) -> Judged:
    """The figures of a case, from what its ranks measured."""
    found: Mapping[str, Any] = result["variants"]
    names = list(found)
    ranks = [{n: found[n]["times"][r] for n in names} for r in range(result["ranks"])]
    times = slowest(ranks)
    steps = {name: figures.whole(each) for name, each in times.items()}
    medians = {name: figures.spread(each).median for name, each in steps.items()}
    baselines = [name for name in names if found[name]["kind"] == "baseline"]
    base = min(baselines, key=medians.__getitem__)
    without = bare_of(base, names)
    limit = bare = float("nan")
    if without in times and result["link"] != SINGLE:
        bare = medians[without]
        limit = figures.limit_ms(figures.phases(times[base]), figures.phases(times[without]))
    shared = {"base": base, "limit_ms": limit, "without_ms": bare, **_origin(result)}
    where = {key: result[key] for key in ("case", "link", "connections")}
    rows: list[Row] = []
    for name in names:
        parts = figures.phases(times[name])
        middle = figures.spread(steps[name])
        ratios = figures.ratios(steps[base], steps[name])
        rows.append(
            {
                **where,
                "variant": name,
                "kind": found[name]["kind"],
                "ms": middle.median,
                "q1_ms": middle.low,
                "q3_ms": middle.high,
                "forward_ms": parts[0],
                "backward_ms": parts[1],
                "speedup": figures.spread(ratios).median,
                "lower_bound": figures.lower_bound(ratios),
                "over_eager": medians[EAGER] / middle.median,
                "H": figures.share_of(medians[base], middle.median, bare),
                "E": figures.share_of(medians[base], middle.median, limit),
                **_facts(found, name),
                **_start(found, medians, name),
                **shared,
            }
        )
        if result["link"] == SINGLE:
            rows[-1]["note"] = ALONE
    idle = [(name, f"skipped: {why}") for name, why in result["skipped"].items()]
    idle += [(name, f"failed: {why}") for name, why in result["failed"].items()]
    for name, why in idle:
        rows.append(dict.fromkeys(rows[0]) | where | {"variant": name, "note": why} | shared)
    ablation = _ablation(steps, medians, {row["variant"]: row for row in rows})
    return Judged(**where, base=base, without=without, limit_ms=limit, rows=rows, ablation=ablation)


def _start(found: Mapping[str, Any], medians: Mapping[str, float], name: str) -> Row:
    """Seconds until everything was compiled and recorded, beyond what as many later steps take."""
    own, plain = (
        max(0.0, found[each]["ready_s"] - steps * medians[each] / 1e3)
        if each in found and (steps := found[each].get("steps"))
        else None
        for each in (name, UNCUT)
    )
    ratio = None if own is None or not plain else own / plain
    return {"startup_s": own, "startup_ratio": ratio}


def _facts(found: Mapping[str, Any], name: str) -> Row:
    mine, plain = found[name], found.get(UNCUT, {})
    copied, uncut = mine["copied_bytes"], plain.get("copied_bytes")
    peak, plain_peak = mine["peak_mib"], plain.get("peak_mib")
    inside = mine.get("communication_ms")
    note = "" if inside is not None else "no kernel intervals on the CPU: hidden_share is n/a"
    return {
        "hidden_share": mine["hidden_ms"] / inside if inside else None,
        "communication_ms": inside,
        "cpu_ms": mine["cpu_ms"],
        "first_step_s": mine["first_step_s"],
        "ready_s": mine["ready_s"],
        "recorded_ms": mine["recorded_ms"],
        "peak_mib": peak,
        "peak_ratio": peak / plain_peak if peak and plain_peak else None,
        "reserved_mib": mine["reserved_mib"],
        "graph_mib": mine.get("graph_mib"),
        "copies": mine["copies"],
        "copied_mib": None if copied is None else copied / MIB,
        "extra_copied_mib": None if None in (copied, uncut) else (copied - uncut) / MIB,
        "gradient_error": mine["gradient_error"],
        "says": mine["says"],
        "note": note,
    }


def _origin(result: Mapping[str, Any]) -> Row:
    versions = {f"version_{key}": text for key, text in result["versions"].items()}
    kept = ("device", "ranks", "copies", "routing", "rounds", "executor", "commit", "command")
    return {key: result.get(key) for key in kept} | versions


def _ablation(
    steps: Mapping[str, Sequence[float]], medians: Mapping[str, float], facts: Mapping[str, Row]
) -> list[Row]:
    """What each thing is worth: > 1 means the step is slower without it; what both cost."""
    rows: list[Row] = []
    for thing, whole, without in ABLATION:
        if whole in steps and without in steps:
            values = figures.ratios(steps[without], steps[whole])
            times = {"ms": medians[whole], "ms_without": medians[without]}
            worth = {"worth": figures.spread(values).median}
            bound = {"lower_bound": figures.lower_bound(values)}
            costs = {cost: facts[whole][cost] for cost in COSTS}
            costs |= {f"{cost}_without": facts[without][cost] for cost in COSTS}
            rows.append({"off": thing, "of": whole, "is": without} | times | worth | bound | costs)
    return rows


def table(judged: Judged) -> str:
    """For people."""
    head = f"{judged.case}, {judged.place}: best baseline {judged.base}, "
    if judged.link == SINGLE:
        head += ALONE
    else:
        head += f"limit {judged.limit_ms:.3f} ms (without collectives: {judged.without})"
    lines = [head, "  ".join(f"{name:>{width}}" for name, width in SHOWN.items())]
    for row in judged.rows:
        if row["ms"] is None:
            lines.append(f"{row['variant']:>30}  {row['note'].splitlines()[0][:200]}")
            continue
        cells = (f"{_short(row[name]):>{width}}" for name, width in SHOWN.items())
        lines.append("  ".join(cells))
    lines += [
        f"without {row['off']}: {row['of']} {row['ms']:.3f} ms -> {row['is']} "
        f"{row['ms_without']:.3f} ms, worth {row['worth']:.3f}x; "
        + ", ".join(f"{c} {_short(row[c])} -> {_short(row[f'{c}_without'])}" for c in COSTS)
        for row in judged.ablation
    ]
    lines += [f"{r['variant']}: {r['says']}" for r in judged.rows if r["says"]]
    if routing := judged.rows[0]["routing"]:
        lines.append(routing)
    if (best := judged.best) is not None:
        lines.append(_verdict(best))
    return "\n".join(lines)


def _verdict(best: Row) -> str:
    bound, name = best["lower_bound"], best["variant"]
    if bound is None:
        return f"best of ours {name}: fewer than 5 rounds, no bound of its ratios"
    word = "not slower" if bound >= NOT_SLOWER else "not shown to be as fast"
    return (
        f"best of ours {name}: {word}; lower 95% bound of its ratios {bound:.3f}, at least "
        f"{NOT_SLOWER} wanted"
    )


def _short(value: Any) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:30]


def write(
    judged: Sequence[Judged],
    results: Sequence[Mapping[str, Any]],
    failures: Mapping[str, str],
    folder: Path,
) -> None:
    """`results.json` (raw times, figures, failures) and `results.csv` (a row a variant).

    Args:
        judged: of each case and link, in the order of `results`.
        results: what the ranks measured.
        failures: "case link" -> error.
        folder: where to.
    """
    content = [
        {**result, "figures": {"limit_ms": each.limit_ms, "base": each.base, "rows": each.rows,
                               "ablation": each.ablation}}
        for result, each in zip(results, judged, strict=True)
    ]  # fmt: skip
    text = json.dumps({"cases": content, "failures": dict(failures)})
    (folder / "results.json").write_text(text, encoding="utf-8")
    rows = [row for each in judged for row in each.rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
