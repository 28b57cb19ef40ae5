"""A group of processes: who fails ends the others; what hangs is stopped; nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from dynaflow_train.benchmarks import group
from dynaflow_train.benchmarks.job import Job

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(
        ("one", "two"), ("sequential",), "gloo", "cpu", 2, 20, "eager", ablation=False, cold=False,
        limit_s=30.0, out=str(tmp_path), scratch=str(tmp_path), note={"commit": "abc"},
    )  # fmt: skip


def start(*programs: str) -> list[subprocess.Popen[bytes]]:
    head = "import sys, time, pathlib\n"
    return [subprocess.Popen([sys.executable, "-c", head + text]) for text in programs]


def nothing(path: Path) -> None:
    del path


def test_a_job_loads_back(job, tmp_path):
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_results_are_handed_on_as_they_come(job, tmp_path):
    text = "pathlib.Path(r'{}').write_text('1')"
    programs = [text.format(job.result("one")), text.format(job.result("two"))]
    seen = []
    assert group._watch(job, start(*programs), seen.append) is None
    assert sorted(seen) == sorted([job.result("one"), job.result("two")])


def test_one_rank_that_fails_ends_the_others_and_is_named(job, monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 1.0)
    job.error(1).write_text("RuntimeError: no memory")
    processes = start("time.sleep(60)", "sys.exit(1)")
    begin = time.monotonic()
    error = group._watch(job, processes, nothing)
    assert time.monotonic() - begin < 10
    assert error is not None
    assert error.startswith("rank 1: RuntimeError: no memory (tracebacks: ")
    assert all(process.poll() is not None for process in processes)


def test_a_rank_that_dies_without_a_word_is_named_by_its_exit_code(job):
    error = group._watch(job, start("sys.exit(7)", "sys.exit(7)"), nothing)
    assert error is not None
    assert error.startswith("ranks 0, 1: exit code 7 (")


def test_a_case_that_hangs_is_stopped(job):
    import dataclasses

    processes = start("time.sleep(60)", "time.sleep(60)")
    error = group._watch(dataclasses.replace(job, limit_s=1.0), processes, nothing)
    assert error == "took longer than 1 s (--limit); all ranks were stopped"
    assert all(process.poll() is not None for process in processes)
