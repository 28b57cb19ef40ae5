"""The scaling run: tensor and expert parallelism over 2, 4 and 8 GPUs of one host, in some minutes.

Each row is a case on a number of ranks and a link, with all baselines and strategies in turn. A
group of its own checks every variant's gradients against the unsplit run, then times those that are
right. The largest number of ranks comes first. A row that would not end in time is not begun: it is
listed, as is all else that was not run, with the reason.

python -m dynaflow_train.benchmarks.scaling --out folder
python -m dynaflow_train.benchmarks.scaling --plan                    # what would run, and how long
python -m dynaflow_train.benchmarks.scaling --device cpu --ranks 8 --rows "ep*" --strategies \
    dual_batch --rounds 2 --no-charts                                 # a rehearsal
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.benchmarks import chart, command, group, report, scaling_rows
from dynaflow_train.benchmarks.job import Job
from dynaflow_train.benchmarks.report import NOT_SLOWER, Judged
from dynaflow_train.benchmarks.scaling_rows import WANTED_E, Row
from dynaflow_train.benchmarks.variants import variants
from dynaflow_train.errors import DynaFlowError, RecipeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[Job, group.Seen], dict[str, str]]

MEASURED, FAILED, NOT_RUN, REFUSED = "measured", "failed", "not run", "refused"
WRONG = "gradients are wrong"


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        status: one of the four above. note: the reason of all but the first.
        seconds: that it took; estimate: what it was thought to take.
        result, judged: what the ranks measured, and the figures.
    """

    row: Row
    status: str
    note: str = ""
    seconds: float = 0.0
    estimate: float = 0.0
    result: dict[str, Any] | None = None
    judged: Judged | None = None


@dataclass
class Run:
    """Rows within a time.

    Attributes:
        job: what all rows share. seconds: for all of them.
        measure: runs one row's job. now: seconds of a clock.
    """

    job: Job
    seconds: float
    measure: Measure = group.run
    now: Callable[[], float] = time.monotonic
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def __post_init__(self) -> None:
        """The clock runs from here."""
        self.begun = self.now()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (self.now() - self.begun)

    @property
    def pace(self) -> float:
        """Seconds that passed for each that was estimated; 1 before anything was run.

        A row that failed early says nothing of it.
        """
        outcomes = [each for each in self.outcomes if each.seconds]
        ran = [each for each in outcomes if each.status == MEASURED or each.seconds > each.estimate]
        return sum(each.seconds for each in ran) / sum(each.estimate for each in ran) if ran else 1

    def do(self, row: Row) -> Outcome:
        """Measure a row, or say why not."""
        reason = self._why_not(row)
        outcome = reason or self._measured(row)
        self.outcomes.append(outcome)
        return outcome

    def _why_not(self, row: Row) -> Outcome | None:
        if row.refused:
            return Outcome(row, REFUSED, row.refused)
        if row.ranks > self.job.ranks:
            return Outcome(row, NOT_RUN, f"it needs {row.ranks} devices, here are {self.job.ranks}")
        needs = row.seconds(self.job.strategies) * self.pace
        if needs > self.left:
            note = f"it takes about {needs:.0f} s, {max(0.0, self.left):.0f} s were left"
            return Outcome(row, NOT_RUN, note)
        return None

    def _measured(self, row: Row) -> Outcome:
        paths: list[Path] = []
        job = dataclasses.replace(
            self.job,
            cases=(row.case,),
            link=row.link,
            ranks=row.ranks,
            copies=row.copies,
            limit_s=self.left,
            out=str(Path(self.job.out) / row.id),
        )
        start = self.now()
        failures = self.measure(job, paths.append)
        taken, estimate = self.now() - start, row.seconds(job.strategies)
        if failures:
            return Outcome(row, FAILED, "; ".join(failures.values()), taken, estimate)
        result = json.loads(paths[0].read_text(encoding="utf-8"))
        result["case"] = row.name
        return Outcome(row, MEASURED, "", taken, estimate, result, report.judge(result))


def summary(each: Outcome) -> dict[str, Any]:
    """A line of `scaling.csv`."""
    row, judged = each.row, each.judged
    line: dict[str, Any] = {"row": row.name, "case": row.case, "link": row.link}
    line |= {"ranks": row.ranks, "copies": row.copies, "status": each.status, "note": each.note}
    line |= {"seconds": round(each.seconds, 1), "wanted": row.wanted}
    figures = ("ms", "speedup", "lower_bound", "E", "H", "hidden_share")
    line |= dict.fromkeys(("gradients", "base", "base_ms", "limit_ms", "best", *figures))
    line |= {"not_slower": None, "reached": None}
    if judged is None or each.result is None:
        return line
    (base,) = [r for r in judged.rows if r["variant"] == judged.base]
    line |= {"gradients": checked(each.result), "base": judged.base, "base_ms": base["ms"]}
    line["limit_ms"] = judged.limit_ms
    if (best := judged.best) is not None:
        line |= {"best": best["variant"], **{key: best[key] for key in figures}}
        bound, share = best["lower_bound"], best["E"]
        line["not_slower"] = None if bound is None else bound >= NOT_SLOWER
        if row.wanted is not None:
            line["reached"] = best["speedup"] >= row.wanted and (share or 0.0) >= WANTED_E
    return line


def checked(result: Mapping[str, Any]) -> str:
    """How many variants' gradients are the unsplit run's, and whose are not."""
    right = sum(each["kind"] != "without" for each in result["variants"].values())
    wrong = [name for name, why in result["failed"].items() if WRONG in why]
    return f"{right} right" + (f", wrong: {', '.join(wrong)}" if wrong else "")


def write(run: Run, charts: bool) -> None:
    """All files of the run, after every row: it may be cut short."""
    folder, lines = Path(run.job.out), [summary(each) for each in run.outcomes]
    text = json.dumps({**run.job.note, "seconds": run.seconds, "rows": lines})
    (folder / "scaling.json").write_text(text, encoding="utf-8")
    with (folder / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    ran = [(each.judged, each.result) for each in run.outcomes if each.judged and each.result]
    failures = {each.row.id: each.note for each in run.outcomes if each.status == FAILED}
    judged = [one for one, _ in ran]
    report.write(judged, [result for _, result in ran], failures, folder)
    for name in dict.fromkeys(each.case for each in judged if charts):
        chart.draw([each for each in judged if each.case == name], folder / f"{name}.svg")


def told(each: Outcome) -> str:
    """For people: the bench's table, then one line."""
    line = summary(each)
    words = [f"{each.row.id}: {each.status}"]
    if each.status != MEASURED:
        return f"{words[0]}: {each.note}"
    words.append(f"gradients {line['gradients']}, in {each.seconds:.0f} s")
    if line["best"]:
        words.append(f"{line['best']} {line['speedup']:.3f}x over {line['base']}")
    if line["reached"] is not None:
        words.append(f"wanted {each.row.wanted}x and E {WANTED_E}: reached {line['reached']}")
    table = report.table(each.judged) if each.judged else ""
    return "\n".join([table, "; ".join(words), ""])


def planned(run: Run, chosen: Sequence[Row]) -> str:
    """Rows in their order, with what each would take; those that would not be begun say so."""
    used, lines = 0.0, list[str]()
    for row in chosen:
        if (reason := run._why_not(row)) and (row.refused or row.ranks > run.job.ranks):
            lines.append(f"{row.id}: {reason.status}: {reason.note}")
            continue
        needs = row.seconds(run.job.strategies)
        fits = used + needs <= run.seconds
        used += needs * fits
        words = f"about {needs:.0f} s" + (f", {used:.0f} s till then" if fits else ": no time left")
        lines.append(f"{row.id}: {row.case} on {row.ranks}, {row.copies} of the model, {words}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dynaflow_train.benchmarks.scaling",
        description=(__doc__ or "").splitlines()[0],
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=["*"], help="names, with * for anything (default: all)")
    add("--plan", action="store_true", help="say what would run, and how long, and stop")
    add("--minutes", type=float, default=8.0, help="no row is begun that ends later (default: 8)")
    add("--device", choices=tuple(command.LINKS), help="(default: cuda where there is one)")
    add("--ranks", type=int, help="most ranks of a row (default: all GPUs; 2 on the CPU)")
    add("--rounds", type=int, default=command.LEAST_ROUNDS, help="(default: 20)")
    add(
        "--strategies",
        nargs="+",
        default=["all"],
        help="as in dynaflow bench; all (default), or few: those that were best on two GPUs",
    )
    add("--out", type=Path, default=Path("benchmarks/results/scaling"), help="folder")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--no-charts", action="store_true", help="no pictures, no matplotlib")
    return parser


def _job(given: argparse.Namespace, typed: Sequence[str]) -> Job:
    """What all rows share; everything that was typed is checked.

    Raises:
        RecipeError: a strategy or a number that cannot be.
        UnsupportedError: fewer than two devices, or than were asked for.
    """
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    there = torch.cuda.device_count() if device == "cuda" else None
    ranks = given.ranks or (2 if there is None else there)
    if there is not None and there < max(ranks, 2) and not given.plan:
        raise UnsupportedError(
            f"{max(ranks, 2)} CUDA devices are needed, found {there}: ask for fewer --ranks (at "
            "least 2), or rehearse with --device cpu; --plan --ranks 8 needs none"
        )
    for name, value, least in (("--rounds", given.rounds, 1), ("--ranks", ranks, 2)):
        if value < least:
            raise RecipeError(f"{name} must be at least {least}, found {value}")
    if not given.minutes > 0:
        raise RecipeError(f"--minutes must be above 0, found {given.minutes:g}")
    lines = [one for each in given.strategies for one in scaling_rows.WORDS.get(each, (each,))]
    variants(lines)  # refuses what does not exist
    words = ["python", "-m", "dynaflow_train.benchmarks.scaling", *typed]
    note = {"commit": given.commit or command.commit(), "command": shlex.join(words)}
    return Job(
        (), tuple(dict.fromkeys(lines)), "", device, ranks, given.rounds,
        "inductor" if device == "cuda" else "eager", ablation=False, cold=False,
        limit_s=given.minutes * 60, out=str(given.out), check=True, note=note,
    )  # fmt: skip


def main(typed: Sequence[str] | None = None, measure: Measure = group.run) -> int:
    """0; 1 where a row or a variant failed; 2 where what was typed cannot be."""
    words = list(sys.argv[1:] if typed is None else typed)
    given = _parser().parse_args(words)
    try:
        job = _job(given, words)
        chosen = scaling_rows.pick(scaling_rows.rows(job.device), given.rows)
        if not (given.no_charts or given.plan):
            chart.check()
    except DynaFlowError as error:
        print(error, file=sys.stderr)
        return 2
    run = Run(job, given.minutes * 60, measure)
    if given.plan:
        print(planned(run, chosen))
        return 0
    Path(job.out).mkdir(parents=True, exist_ok=True)
    for row in chosen:
        print(told(run.do(row)), flush=True)
        write(run, charts=not given.no_charts)
    number = sum(each.status == MEASURED for each in run.outcomes)
    print(f"{number} of {len(chosen)} rows measured; {job.out}/scaling.csv")
    broken = [each.row.id for each in run.outcomes if each.status == FAILED]
    broken += [
        f"{each.row.id} {name}"
        for each in run.outcomes
        for name in (each.result or {}).get("failed", ())
    ]
    if broken:
        print(f"failed: {', '.join(broken)}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
