"""All that a machine with GPUs must show, in one call: the tests, then the timings.

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
DEMO = ("recipes/demo/run.py",)
CASES = ("8b-2x4096", "8b-2x1024", "70b-2x4096", "70b-2x1024")
LINKS = ("nvlink", "no-p2p")


def parts(device: str, out: Path, rounds: int) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Name -> seconds it may take and what Python runs; the most wanted first."""
    if device == "cpu":
        tiny = ("--device", "cpu", "--cases", "tiny", "--executor", "eager", "--rounds", "3")
        folder = ("--out", str(out / "tiny"))
        return {"tests": (300, PYTEST), "tiny": (600, (*BENCH, *tiny, *STRATEGIES, *folder))}
    found: dict[str, tuple[int, tuple[str, ...]]] = {"tests": (420, PYTEST), "demo": (150, DEMO)}
    for case in CASES:
        for link in LINKS:  # the second finds everything compiled by the first
            where = ("--cases", case, "--links", link, "--out", str(out / f"{link}-{case}"))
            run = (*BENCH, *where, "--rounds", str(rounds), *STRATEGIES)
            found[f"{link}-{case}"] = (240, run)
    return found


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
        if given.commit and command[: len(BENCH)] == BENCH:
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
