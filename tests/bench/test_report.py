"""Rows, tables, files and charts of a case whose figures are worked out by hand."""

from __future__ import annotations

import csv
import json
from importlib import util

import pytest

from dynaflow_train.benchmarks import chart, report
from dynaflow_train.errors import UnsupportedError
from tests.bench.results import result, variant


@pytest.fixture
def judged() -> report.Judged:
    return report.judge(result())


def row(judged: report.Judged, name: str) -> report.Row:
    (found,) = [each for each in judged.rows if each["variant"] == name]
    return found


def test_base_limit_h_and_e(judged):
    assert (judged.base, judged.without) == ("compile", "compile, no collectives")
    assert judged.limit_ms == 17 + 25  # the forward is bound by communication: 30 - 13
    ours = row(judged, "dual_batch")
    assert (ours["ms"], ours["forward_ms"], ours["backward_ms"]) == (52, 20, 32)
    assert ours["H"] == pytest.approx((72 - 52) / (72 - 38))
    assert ours["E"] == pytest.approx((72 - 52) / (72 - 42))
    assert ours["speedup"] == pytest.approx(72 / 52)
    assert ours["lower_bound"] == pytest.approx(72 / 53)  # of 5 rounds the worst; slowest rank
    assert ours["over_eager"] == pytest.approx(90 / 52)
    assert row(judged, "compile")["ms"] == 72  # the slower rank's


def test_hidden_share_copies_and_memory(judged):
    ours = row(judged, "dual_batch")
    assert ours["hidden_share"] == 0.25
    assert (ours["copied_mib"], ours["extra_copied_mib"]) == (3, 2)
    assert ours["peak_ratio"] == pytest.approx(1.05)
    assert "dual_batch: stack forward: 1 CUDA graph\nstack backward" in report.table(judged)


def test_a_recorded_baseline_is_compared_with_its_own_step_without_collectives():
    found = result()
    graph = [(10.0, 20.0)] * 5
    found["variants"]["compile+graph"] = variant("baseline", graph, graph)
    bare = [(9.0, 12.0)] * 5
    found["variants"]["compile+graph, no collectives"] = variant("without", bare, bare)
    judged = report.judge(found)
    assert (judged.base, judged.without) == ("compile+graph", "compile+graph, no collectives")
    assert judged.limit_ms == 9 + 12


def test_no_kernel_intervals_is_said_not_guessed():
    found = result("gloo")
    for each in found["variants"].values():
        del each["communication_ms"], each["hidden_ms"]
    ours = row(report.judge(found), "dual_batch")
    assert ours["hidden_share"] is None
    assert ours["note"].startswith("no kernel intervals on the CPU: hidden_share is n/a")


def test_one_rank_has_no_communication_to_be_judged_by():
    found = result("single") | {"ranks": 1}
    judged = report.judge(found)
    ours = row(judged, "dual_batch")
    assert (ours["H"], ours["E"], ours["link"]) == (None, None, "single")
    assert ours["note"].startswith("one rank: collectives over a group of one, no communication")
    assert "no communication is measured" in report.table(judged).splitlines()[0]


def test_startup_is_what_goes_beyond_as_many_steps():
    found = result()
    found["variants"]["compile"] |= {"ready_s": 2.0, "steps": 10}
    found["variants"]["dual_batch"] |= {"ready_s": 3.0, "steps": 20}
    ours = row(report.judge(found), "dual_batch")
    assert ours["startup_s"] == pytest.approx(3.0 - 20 * 0.052)
    assert ours["startup_ratio"] == pytest.approx((3.0 - 20 * 0.052) / (2.0 - 10 * 0.072))
    assert row(report.judge(result()), "dual_batch")["startup_s"] is None  # steps not counted


def test_what_did_not_run_says_why(judged):
    assert row(judged, "compile+graph")["note"] == "skipped: no graphs here"
    assert row(judged, "nanoflow")["note"] == "failed: rank 1: broke"
    assert row(judged, "nanoflow")["ms"] is None
    text = report.table(judged)
    assert "nanoflow  failed: rank 1: broke" in text
    assert "best of ours dual_batch: not slower; lower 95% bound of its ratios 1.358" in text


def test_ablation_says_what_each_thing_is_worth():
    found = result()
    times = {"auto+graph": 40.0, "auto": 50.0, "dual_batch+graph": 44.0}
    for name, ms in times.items():
        rounds = ([(ms / 2, ms / 2)] * 5 for _ in range(2))
        facts = {"cpu_ms": 7.0} if name == "auto" else {}
        found["variants"][name] = variant("ours", *rounds, **facts)
    worth = {each["off"]: each["worth"] for each in report.judge(found).ablation}
    assert worth == {"CUDA graphs": 1.25, "dynamic choice": pytest.approx(1.1)}
    rows = report.judge(found).ablation
    assert (rows[0]["cpu_ms"], rows[0]["cpu_ms_without"], rows[0]["graph_mib"]) == (3, 7, 0)
    assert "worth 1.250x; cpu_ms 3 -> 7" in report.table(report.judge(found))


def test_files_load_back(judged, tmp_path):
    report.write([judged], [result()], {"tiny no-p2p": "rank 0: broke"}, tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["failures"] == {"tiny no-p2p": "rank 0: broke"}
    (case,) = content["cases"]
    assert case["variants"]["dual_batch"]["times"][1][2] == [20, 33]  # every round of every rank
    assert (case["commit"], case["command"], case["versions"]["torch"]) == (
        "abc", "dynaflow bench", "2.11.0",
    )  # fmt: skip
    assert report.judge(case).rows == judged.rows  # the figures follow from what was kept
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [each["variant"] for each in rows] == [each["variant"] for each in judged.rows]
    ours = rows[2]
    assert (float(ours["ms"]), float(ours["limit_ms"]), ours["link"]) == (52, 42, "no-p2p")
    assert (ours["device"], ours["commit"], ours["version_torch"]) == (
        "NVIDIA H200", "abc", "2.11.0",
    )  # fmt: skip
    assert rows[-1]["ms"] == ""


def test_the_chart_shows_every_variant_and_link(tmp_path):
    links = [report.judge(result(link)) for link in ("nvlink", "no-p2p")]
    path = chart.draw(links, tmp_path / "c.svg")
    text = path.read_text()
    shown = ("dual_batch", "compile, no collectives", "8b-2x4096, nvlink", "8b-2x4096, no-p2p")
    for words in (*shown, "E 0.67", "limit"):
        assert f"<!-- {words}" in text or words in text, words
    assert "nanoflow" not in text


def test_without_matplotlib_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"install 'dynaflow-train\[plot\]', or pass --no-"):
        chart.check()
