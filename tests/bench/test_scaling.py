"""The scaling run: which rows, in which order, in what time; what is not run is listed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from dynaflow_train.benchmarks import scaling, scaling_rows
from dynaflow_train.benchmarks.cases import CASES
from dynaflow_train.benchmarks.job import Job
from tests.bench.results import result

CPU = ("--device", "cpu", "--ranks", "4", "--no-charts", "--strategies", "dual_batch")


class Ranks:
    """In the place of processes: every row takes `seconds` and finds the same."""

    def __init__(self, seconds=1.0, error=None):
        self.seconds, self.error, self.jobs, self.time = seconds, error, [], 0.0

    def __call__(self, job, seen):
        self.jobs.append(job)
        self.time += self.seconds
        if self.error:
            return {job.cases[0]: self.error}
        path = job.result(job.cases[0])
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**result(job.link), "copies": job.copies}))
        seen(path)
        return {}


def run_of(ranks, folder, devices=8, seconds=480.0):
    job = Job(
        (), ("dual_batch",), "", "cuda", devices, 5, "inductor", ablation=False, cold=False,
        limit_s=seconds, out=str(folder), check=True,
    )  # fmt: skip
    return scaling.Run(job, seconds, ranks, now=lambda: ranks.time)


def test_rows_are_those_asked_for_the_largest_first():
    rows = scaling_rows.rows("cuda")
    numbers = [row.ranks for row in rows]
    assert numbers == sorted(numbers, reverse=True)
    both = {"nvlink", "no-p2p"}
    for n in (2, 4, 8):
        for model in ("8b", "70b"):
            assert {r.link for r in rows if r.name == f"tp{n}-{model}"} == both
        for model in ("mixtral", "qwen-moe"):
            for skew in ("", "-skewed"):
                assert {r.link for r in rows if r.name == f"ep{n}-{model}{skew}"} == both
    copies = {r.name: (r.ranks, r.copies) for r in rows if "-dp" in r.name}
    assert copies == {"tp4-dp2-8b": (8, 2), "tp2-dp4-8b": (8, 4), "tp2-dp2-8b": (4, 2)}
    for row in (*rows, *scaling_rows.rows("cpu")):
        if row.case:
            CASES[row.case].cut(row.ranks // row.copies)  # raises where it cannot be cut
    assert [r.wanted for r in rows if r.id in {"tp8-8b.nvlink", "tp4-8b.nvlink"}] == [1.15, None]
    assert {row.wanted for row in scaling_rows.rows("cpu")} == {None}


def test_both_parallelisms_together_show_the_toolkits_words():
    (row,) = scaling_rows.pick(scaling_rows.rows("cuda"), ["tp2-ep4"])
    assert row.refused.startswith("expert_parallel 4 and tensor parallelism over 2 ranks exclude")
    assert scaling.Run(*vars_of()).do(row).status == "refused"


def vars_of():
    run = run_of(Ranks(), "")
    return run.job, run.seconds, run.measure


def test_what_does_not_fit_is_listed_at_the_measured_pace(tmp_path):
    rows = scaling_rows.pick(scaling_rows.rows("cuda"), ["tp8-8b", "tp8-70b", "tp4-8b", "tp2-ep2"])
    estimate = rows[0].seconds(("dual_batch",))
    ranks = Ranks(seconds=3 * estimate)
    run = run_of(ranks, tmp_path, devices=8, seconds=7 * estimate)
    found = [run.do(row) for row in rows]
    assert [each.status for each in found] == ["measured"] * 2 + ["not run"] * 4 + ["refused"]
    other = rows[1].seconds(("dual_batch",))  # less: async TP needs NVLink
    assert run.pace == pytest.approx(6 * estimate / (estimate + other))
    more, left = run.pace * rows[2].seconds(("dual_batch",)), estimate
    assert found[2].note == f"it takes about {more:.0f} s, {left:.0f} s were left"
    assert [job.limit_s for job in ranks.jobs] == pytest.approx([7 * estimate, 4 * estimate])
    first = ranks.jobs[0]
    assert (first.ranks, first.copies, first.check, first.link) == (8, 1, True, "nvlink")
    assert [Path(job.out).name for job in ranks.jobs] == ["tp8-8b.nvlink", "tp8-8b.no-p2p"]


def test_more_ranks_than_devices_and_failures_are_listed(tmp_path):
    rows = scaling_rows.pick(scaling_rows.rows("cuda"), ["tp[48]-8b.nvlink"])
    run = run_of(Ranks(error="ranks 0, 1: no memory"), tmp_path, devices=4)
    found = [run.do(row) for row in rows]
    notes = ["it needs 8 devices, here are 4", "ranks 0, 1: no memory"]
    assert [(each.status, each.note) for each in found] == list(
        zip(["not run", "failed"], notes, strict=True)
    )


def test_files_hold_every_row_and_what_was_wanted(tmp_path, capsys):
    words = [*CPU, "--rows", "tp8-8b", "ep4-mixtral", "tp2-dp2-8b", "tp2-ep2", "--out"]
    assert scaling.main([*words, str(tmp_path)], Ranks()) == 1  # a variant of the result failed
    with (tmp_path / "scaling.csv").open() as file:
        lines = {line["row"]: line for line in csv.DictReader(file)}
    assert list(lines) == ["tp8-8b", "ep4-mixtral", "tp2-dp2-8b", "tp2-ep2"]
    found = {name: line["status"] for name, line in lines.items()}
    assert list(found.values()) == ["not run", "measured", "measured", "refused"]
    mixtral = lines["ep4-mixtral"]
    assert (mixtral["base"], mixtral["best"], mixtral["not_slower"]) == (
        "compile", "dual_batch", "True",
    )  # fmt: skip
    assert (mixtral["gradients"], float(mixtral["speedup"])) == ("3 right", pytest.approx(72 / 52))
    assert lines["tp2-dp2-8b"]["copies"] == "2"
    with (tmp_path / "results.csv").open() as file:
        cases = {(row["case"], row["copies"]) for row in csv.DictReader(file)}
    assert cases == {("ep4-mixtral", "1"), ("tp2-dp2-8b", "2")}
    assert [r["row"] for r in json.loads((tmp_path / "scaling.json").read_text())["rows"]] == list(
        lines
    )
    out = capsys.readouterr().out
    assert "2 of 4 rows measured" in out
    assert "failed: ep4-mixtral.gloo nanoflow, tp2-dp2-8b.gloo nanoflow" in out


def test_wrong_gradients_are_counted_and_a_target_is_judged(tmp_path):
    (row,) = scaling_rows.pick(scaling_rows.rows("cuda"), ["ep8-qwen-moe.no-p2p"])
    outcome = run_of(Ranks(), tmp_path).do(row)
    outcome.result["failed"] = {"nanoflow": "rank 1: gradients are wrong: input is off by 2"}
    line = scaling.summary(outcome)
    assert line["gradients"] == "3 right, wrong: nanoflow"
    assert (line["wanted"], line["reached"]) == (1.32, True)  # 1.38 and E 0.67


def test_the_plan_runs_nothing_and_needs_no_device(capsys):
    words = ["--plan", "--device", "cuda", "--ranks", "4", "--strategies", "dual_batch"]
    ranks = Ranks()
    assert scaling.main([*words, "--minutes", "3"], ranks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(scaling_rows.rows("cuda"))
    assert lines[0] == "tp8-8b.nvlink: not run: it needs 8 devices, here are 4"
    assert any(line.endswith(": no time left") for line in lines)
    assert any("tp4-8b.nvlink: 8b-2x4096 on 4, 1 of the model, about" in line for line in lines)
    assert ranks.jobs == []
    assert scaling.main([*words[:-1], "few"], ranks) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " s till then" in line]
    links = ("nvlink", "no-p2p")
    wanted = [f"{name}.{link}" for name in ("tp4-8b", "ep4-qwen-moe") for link in links]
    assert [line.partition(":")[0] for line in lines][:4] == wanted  # in 8 minutes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "tp8-9b"), "no row 'tp8-9b'. Did you mean 'tp8-8b'?"),
        (("--minutes", "0"), "--minutes must be above 0, found 0"),
        (("--ranks", "1"), "--ranks must be at least 2, found 1"),
        (("--strategies", "dual_bach"), "no strategy 'dual_bach'. Did you mean 'dual_batch'?"),
    ],
)
def test_wrong_words_are_refused(words, message, capsys, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    assert scaling.main(["--device", "cpu", "--no-charts", *words, *out]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
