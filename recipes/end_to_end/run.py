"""A training in every way on the same weights and data: tokens/s and losses, with and without.

    python -m recipes.end_to_end.run --links no-p2p nvlink --out folder          # two GPUs
    python -m recipes.end_to_end.run --device cpu --out folder                   # a rehearsal

Each run is an `accelerate launch` of its own with a time limit. `results.csv` has a row a run,
`results.json` every step of every rank too; both are written anew after each run.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaflow_train.benchmarks.figures import spread
from recipes.end_to_end.runs import GRAPH, LINKS, MODES, RECIPE_FOR, Ran, Run, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Sizes = dict[str, int | float]

PLAIN, GIB = "plain", 2**30
TINY: Sizes = {
    "batch": 4,
    "length": 32,
    "hidden": 64,
    "layers": 2,
    "steps": 6,
    "skip": 2,
    "rate": 1e-2,
}
FULL: Sizes = {
    "batch": 2,
    "length": 4096,
    "hidden": 4096,
    "layers": 8,
    "steps": 200,
    "skip": 20,
    "rate": 1e-4,
}
SHOWN = {
    "link": 7, "mode": 13, "tokens_per_s": 13, "q1": 9, "q3": 9, "speedup": 8, "final_loss": 11,
    "loss_difference": 16, "hidden_share": 13, "peak_gib": 9, "start_s": 8, "first_step_s": 13,
}  # fmt: skip
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """The command line, sizes filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=tuple(LINKS), default="cuda")
    add("--links", nargs="+", help="no-p2p nvlink; on the CPU gloo (default: all)")
    add("--modes", nargs="+", choices=MODES, help="(default: all that the device can)")
    for name in FULL:
        add(
            f"--{name}",
            type=type(FULL[name]),
            help=f"(default: {FULL[name]}; on the CPU {TINY[name]})",
        )
    add("--dtype", choices=("bf16", "mixed", "fp32"), help="(default: bf16; on the CPU fp32)")
    add("--recipe", type=Path, help="for every link (default: the one made for it)")
    add("--executor", choices=("inductor", "eager"), help="(default: the recipe's)")
    add("--limit", type=float, default=180.0, help="seconds a run may take")
    add("--total", type=float, default=1800.0, help="seconds all may take")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--out", type=Path, required=True)
    given = parser.parse_args()
    for name, size in (FULL if given.device == "cuda" else TINY).items():
        if getattr(given, name) is None:
            setattr(given, name, size)
    given.dtype = given.dtype or ("bf16" if given.device == "cuda" else "fp32")
    given.links = given.links or LINKS[given.device]
    can = [m for m in MODES if given.device == "cuda" or not m.endswith(GRAPH)]
    given.modes = given.modes or can
    if unknown := set(given.links) - set(LINKS[given.device]):
        parser.error(
            f"no link {min(unknown)!r} on {given.device}: {', '.join(LINKS[given.device])}"
        )
    if impossible := set(given.modes) - set(can):
        parser.error(f"{min(impossible)} needs CUDA graphs, which --device {given.device} has not")
    if given.steps < given.skip + 3:
        parser.error(f"--steps {given.steps} leaves no steady part behind --skip {given.skip}")
    return given


def plan(given: argparse.Namespace) -> Iterator[Run]:
    """All runs, link by link, each link's modes in the order in which they were asked for."""
    sizes = ("steps", "batch", "length", "hidden", "layers", "rate", "dtype")
    own = tuple(w for name in sizes for w in (f"--{name}", str(getattr(given, name))))
    changes = {"executor": given.executor} if given.executor else {}
    for link in given.links:
        for mode in given.modes:
            recipe = given.recipe or RECIPE_FOR[link]
            yield Run(f"{link}-{mode}", mode, link, given.device, recipe, changes, own)


def row(ran: Ran, skip: int) -> Row:
    """The figures of one run; those that need another run's are filled in by `compare`."""
    named = {"link": ran.run.link, "mode": ran.run.mode}
    if ran.error:
        return named | {"note": ran.error}
    first, steady = ran.ranks[0], ran.step_seconds[skip - 1 :]
    rates = spread([first["tokens_per_step"] / seconds for seconds in steady])
    ms = spread([seconds * 1e3 for seconds in steady])
    peaks = [look["most_reserved"] / GIB for rank in ran.ranks for look in rank["memory"]]
    return (
        named
        | {
            "tokens_per_s": rates.median,
            "q1": rates.low,
            "q3": rates.high,
            "ms": ms.median,
            "steady_steps": len(steady),
            "final_loss": ran.losses[-1],
            "hidden_share": first["hidden_share"],
            "peak_gib": max(peaks, default=None),
            "start_s": first["began"] - ran.begun,
            "first_step_s": first["ended"][0] - first["began"],
            "transports": " ".join(ran.transports),
            "gradient_error": ran.report.get("gradient_error"),
            "graphs": "; ".join(ran.report.get("graphs", ())),
            "says": "; ".join(ran.says),
            "device": first["device"],
        }
        | {f"version_{name}": text for name, text in first["versions"].items()}
    )


def compare(found: Sequence[Ran], rows: Sequence[Row]) -> None:
    """Fill in what needs the plain run of the same link."""
    plain = {ran.run.link: (ran, r) for ran, r in zip(found, rows, strict=True)
             if ran.run.mode == PLAIN and not ran.error}  # fmt: skip
    for ran, mine in zip(found, rows, strict=True):
        if ran.error or ran.run.link not in plain:
            continue
        other, theirs = plain[ran.run.link]
        gaps = [abs(a - b) for a, b in zip(ran.losses, other.losses, strict=True)]
        mine["loss_difference"], mine["at_step"] = max(gaps), gaps.index(max(gaps)) + 1
        mine["mean_loss_difference"] = sum(gaps) / len(gaps)
        mine["speedup"] = mine["tokens_per_s"] / theirs["tokens_per_s"]


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = ["".join(f"{name:>{width}}" for name, width in SHOWN.items())]
    for each in rows:
        if "tokens_per_s" not in each:
            lines.append(f"{each['link']:>7}{each['mode']:>13}  {each['note']}")
            continue
        cells = (f"{_short(each.get(name)):>{width}}" for name, width in SHOWN.items())
        lines.append("".join(cells))
    lines += [f"{r['link']} {r['mode']}: {r['says']}" for r in rows if r.get("says")]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "n/a" if value is None else str(value)


def write(given: argparse.Namespace, found: Sequence[Ran], rows: Sequence[Row]) -> None:
    """Both files."""
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    runs = [{"ranks": ran.ranks, "losses": [] if ran.error else ran.losses} for ran in found]
    content = {"settings": settings, "command": sys.argv, "rows": rows, "runs": runs}
    (given.out / "results.json").write_text(json.dumps(content), encoding="utf-8")
    columns = list(dict.fromkeys(key for each in rows for key in each))
    with (given.out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Every run, the files, the table; 1 if a run failed."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    found: list[Ran] = []
    rows: list[Row] = []
    for ran in in_turn(plan(given), given.out, given.limit, given.total):
        found.append(ran)
        rows = [row(ran, given.skip) | {"commit": given.commit} for ran in found]
        compare(found, rows)
        write(given, found, rows)
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}\n\n{given.out}/results.csv, results.json, and a log a run")
    return int(any(ran.error for ran in found))


if __name__ == "__main__":
    sys.exit(main())
