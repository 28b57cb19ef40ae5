"""`dynaflow bench` as typed: what it refuses, and one real run of two ranks."""

from __future__ import annotations

import csv
import json

import pytest

from dynaflow_train.cli import main

CPU = ("bench", "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cases", "tinny"), "no case 'tinny'. Did you mean 'tiny'? There are "),
        (
            ("--cases", "tiny", "--strategies", "dual_bach+graph"),
            "no strategy 'dual_bach'. Did you mean 'dual_batch'?",
        ),
        (
            ("--cases", "tiny", "--strategies", "dual_batch micro_batch=2"),
            "has no parameter 'micro_batch'. Did you mean 'micro_batches'?",
        ),
        (
            ("--cases", "tiny", "--strategies", "auto split_wgrad=false"),
            "split_wgrad=false is a setting of one strategy, auto tries several",
        ),
        (
            ("--cases", "tiny", "--strategies", "dual_batch+cta=8"),
            "no ending '+cta'. Did you mean 'ctas'? There are graph, ctas, copies, layers, ",
        ),
        (
            ("--cases", "tiny", "--strategies", "dual_batch+ctas=0"),
            "+ctas=N takes a whole number of at least 1, found '0'",
        ),
        (
            ("--cases", "tiny", "--connections", "1", "64"),
            "--connections must be from 1 to 32, which is all that CUDA takes, found 64",
        ),
        (
            ("--cases", "tiny", "--links", "nvlink"),
            "no link 'nvlink' on cpu: there are gloo, single",
        ),
        (
            ("--cases", "tiny", "--links", "gloo", "--ranks", "1"),
            "--links gloo with 1 rank: one rank has no link, it is measured alone with --links sin",
        ),
        (
            ("--cases", "tiny", "--links", "single", "--host", "megatron"),
            "--links single is for --host hf or hf-sp, found megatron",
        ),
        (
            ("--cases", "tiny", "--links", "single", "--ranks", "2"),
            "--links single with 2 ranks: one rank has no link",
        ),
        (("--cases", "tiny", "--rounds", "0"), "--rounds must be at least 1, found 0"),
        (("--cases", "tiny", "--ranks", "4"), "'tiny' has kv_heads = 2, which TP 4 does not"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(words, message, capsys, tmp_path):
    assert main([*CPU, *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_cases_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    assert {"tiny", "8b-2x4096-tp8"} <= set(capsys.readouterr().out.split())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_measure_a_case(tmp_path, capsys):
    strategies = ("--strategies", "comm_overlap+ctas=4")
    quick = ("--cases", "tiny", "--executor", "eager", "--rounds", "5", "--limit", "380")
    connections = ("--connections", "32")
    code = main([*CPU, *quick, *strategies, *connections, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == 0, out + (tmp_path / "logs" / "gloo.32-connections.rank0.txt").read_text()
    assert "tiny, gloo, 32 connections: best baseline" in out
    assert "1 of 1 cases measured" in out
    with (tmp_path / "results.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    ours = {"comm_overlap+ctas=4"}
    ran = {"eager", "compile", "dtensor_sp", *ours, "compile, no collectives"}
    assert {name for name, row in rows.items() if row["ms"]} == ran
    assert rows["compile+graph"]["note"] == ("skipped: CUDA graphs need a CUDA device, this is cpu")
    idle = rows["dtensor_sp+async_tp"]["note"]
    assert idle == "skipped: async TP not applied: it needs GPUs with peer access, the link is gloo"
    for name in ("compile", "dtensor_sp", *ours):
        assert 0 < float(rows[name]["ms"]) < 10_000
        assert float(rows[name]["gradient_error"]) < 1e-5
    assert float(rows["eager"]["gradient_error"]) == 0
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    times = case["variants"]["comm_overlap+ctas=4"]["times"]
    assert [len(rank) for rank in times] == [5, 5]
    assert (case["ranks"], case["rounds"], case["connections"]) == (2, 5, "32")
    assert case["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert {row["connections"] for row in rows.values()} == {"32"}
    assert "the group is gloo" in rows["comm_overlap+ctas=4"]["says"]
    assert (tmp_path / "tiny.svg").read_text().count("comm_overlap") >= 1
