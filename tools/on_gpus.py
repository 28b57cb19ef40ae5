"""All that a machine with GPUs must show: the tests, the timings, then whole trainings.

    python -m tools.on_gpus --out results                       # two GPUs; --only picks parts
    python -m tools.on_gpus --out results --device cpu          # a rehearsal, a few minutes

Each part has its own time limit and its own log in the folder, so that one that hangs or fails
takes nothing from the others. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

PYTEST = ("-m", "pytest", "-q", "tests/gpu", "-n", "3", "-p", "no:benchmark", "-p", "no:logging")
BENCH = ("-m", "dynaflow_train.cli", "bench")
STRATEGIES = ("--strategies", "sequential", "comm_overlap", "dual_batch", "nanoflow",
              "comm_overlap+graph", "dual_batch+graph")  # fmt: skip
COPIES = ("sequential+graph", "comm_overlap+copies", "comm_overlap+copies+graph")  # need P2P
DEMO = ("recipes/demo/run.py",)
END_TO_END = ("-m", "recipes.end_to_end.run")
LONG_RUN = ("-m", "recipes.end_to_end.long_run")
CASES = ("8b-2x4096", "8b-2x1024", "70b-2x4096", "70b-2x1024", "8b-2x4096-tp8")
LINKS = ("nvlink", "no-p2p")


def parts(device: str, out: Path, rounds: int) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Name -> seconds it may take and what Python runs; the most wanted first."""
    if device == "cpu":
        tiny = ("--device", "cpu", "--cases", "tiny", "--executor", "eager", "--rounds", "3")
        folder = ("--out", str(out / "tiny"))
        on_cpu, short = ("--device", "cpu"), ("--steps", "20")
        return {
            "tests": (300, PYTEST),
            "tiny": (600, (*BENCH, *tiny, *STRATEGIES, *folder)),
            "end-to-end": (400, trainings(END_TO_END, out / "end-to-end", 400, *on_cpu)),
            "long-run": (400, trainings(LONG_RUN, out / "long-run", 400, *on_cpu, *short)),
        }
    found: dict[str, tuple[int, tuple[str, ...]]] = {"tests": (420, PYTEST), "demo": (150, DEMO)}
    for case in CASES:
        for link in LINKS:  # the second finds everything compiled by the first
            where = ("--cases", case, "--links", link, "--out", str(out / f"{link}-{case}"))
            more = COPIES if link == "nvlink" else ()
            run = (*BENCH, *where, "--rounds", str(rounds), *STRATEGIES, *more)
            found[f"{link}-{case}"] = (300, run)
    for link in reversed(LINKS):
        where = ("--links", link)
        name = f"end-to-end-{link}"
        found[name] = (580, trainings(END_TO_END, out / name, 580, *where))
    found["long-run"] = (480, trainings(LONG_RUN, out / "long-run", 480))
    return found


def trainings(command: tuple[str, ...], out: Path, limit_s: int, *words: str) -> tuple[str, ...]:
    """Ends by itself a minute early: what is stopped from here leaves its ranks behind."""
    return (*command, *words, "--total", str(limit_s - 60), "--out", str(out))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--commit", help="of the benchmarks, where there is no git to ask")
    parser.add_argument("--only", nargs="+", help="names of parts")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (limit_s, command) in parts(given.device, given.out, given.rounds).items():
        if given.only and name not in given.only:
            continue
        if given.commit and command[:2] in (BENCH[:2], END_TO_END, LONG_RUN):
            command = (*command, "--commit", given.commit)
        start, log = time.monotonic(), given.out / f"{name}.log"
        with log.open("w") as text:
            try:
                code = subprocess.run(
                    [sys.executable, *command], stdout=text, stderr=subprocess.STDOUT,
                    timeout=limit_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
        failed += code != 0
        print(f"{name}: exit {code}, {time.monotonic() - start:.0f} s; {log}", flush=True)
        print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
