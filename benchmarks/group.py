"""Starts the ranks of a link, watches them, and starts others for what a failed case left."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynaflow_train.config import CONNECTIONS_VARIABLE, MULTICAST_OFF, for_child

if TYPE_CHECKING:
    from dynaflow_train.benchmarks.job import Job

GRACE_S = 15.0  # after a rank failed, the others may fail alike and say so

Seen = Callable[[Path], None]


def run(job: Job, seen: Seen) -> dict[str, str]:
    """Measure the job's cases; each that fails, with its error.

    Args:
        job: what to measure; results and logs of earlier runs are removed first.
        seen: gets the file of each case as soon as it is there.
    """
    stale = [job.result(case) for case in job.cases]
    for path in [*stale, *Path(job.out).glob(f"logs/{job.place}.rank*.txt")]:
        path.unlink(missing_ok=True)
    left, failures = list(job.cases), {}
    while left:
        with tempfile.TemporaryDirectory() as scratch:
            part = dataclasses.replace(job, cases=tuple(left), scratch=scratch)
            error = _watch(part, _start(part, Path(scratch)), seen)
            done = [case for case in left if job.result(case).exists()]
            left = [case for case in left if case not in done]
            if error is None or not left:
                return failures | ({left[0]: "was not measured"} if left else {})
            never = not part.ready.exists()  # then no case will fare better
        failures |= dict.fromkeys(left if never else left[:1], error)
        left = [] if never else left[1:]
    return failures


def _start(job: Job, scratch: Path) -> list[subprocess.Popen[bytes]]:
    """Each rank a process of its own, which writes a log."""
    path, logs = scratch / "job.json", Path(job.out) / "logs"
    job.save(path)
    logs.mkdir(parents=True, exist_ok=True)
    changes = {"WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks)}
    # What `auto` chose in an earlier run is not taken over: it chooses in this one.
    changes |= MULTICAST_OFF | {"DYNAFLOW_CACHE": "off"}
    if job.link == "no-p2p":
        changes["NCCL_P2P_DISABLE"] = "1"
    if job.connections is not None:
        changes[CONNECTIONS_VARIABLE] = str(job.connections)
    if job.device == "cpu":
        changes |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(job.ranks):
        own = changes | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (logs / f"{job.place}.rank{rank}.txt").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dynaflow_train.benchmarks.rank", str(path)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=for_child(own),
                )
            )
    return processes


def _watch(job: Job, processes: Sequence[subprocess.Popen[bytes]], seen: Seen) -> str | None:
    """Until all ranks are through (None), or what went wrong; none of them is left running."""
    waiting, deadline, broken = list(job.cases), time.monotonic() + job.limit_s, ""
    try:
        while True:
            codes = [process.poll() for process in processes]
            for case in [case for case in waiting if job.result(case).exists()]:
                waiting.remove(case)
                deadline = time.monotonic() + job.limit_s
                seen(job.result(case))
            if all(code == 0 for code in codes):
                return None
            if not broken and any(codes):
                broken = "a rank failed"
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if broken and None not in codes:
                return _errors(job, codes)
            if time.monotonic() > deadline:
                late = f"took longer than {job.limit_s:g} s (--limit); all ranks were stopped"
                return _errors(job, codes) if broken else late
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _errors(job: Job, codes: Sequence[int | None]) -> str:
    """What each failed rank said, or how it died; equal texts once."""
    found: dict[str, list[int]] = {}
    for rank, code in enumerate(codes):
        if code:
            path = job.error(rank)
            said = path.read_text(encoding="utf-8") if path.exists() else f"exit code {code}"
            found.setdefault(said, []).append(rank)
    text = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {said}"
        for said, ranks in found.items()
    )
    return f"{text} (tracebacks: {Path(job.out) / 'logs'})"
