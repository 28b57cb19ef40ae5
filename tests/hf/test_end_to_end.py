"""The trainings of recipes/end_to_end: the command on two CPU processes, and what judges curves."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.end_to_end import curves

ROOT = Path(__file__).parents[2]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_launched_the_losses_are_the_plain_ones(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "recipes.end_to_end.run", "--device", "cpu", "--out", str(tmp_path),
         "--modes", "plain", "launch"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    with (tmp_path / "results.csv").open() as file:
        rows = {row["mode"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["plain", "launch"]
    for name, row in rows.items():
        assert float(row["q1"]) <= float(row["tokens_per_s"]) <= float(row["q3"])
        assert float(row["loss_difference"]) < 1e-5 * math.log(256)
        assert float(row["final_loss"]) < 0.95 * math.log(256)  # it learns
        assert ("micro-batches [2, 2]" in row["says"]) == (name != "plain")
        if name != "plain":
            assert 0 < float(row["gradient_error"]) < 1e-4
            assert 0 <= float(row["hidden_share"]) <= 1


def noisy(seed: int, size: float = 0.01, drift: float = 0.0) -> list[float]:
    """A falling curve with a wave of its own."""
    return [
        4 * math.exp(-i / 300) + size * math.sin(i / (30 + 7 * seed) + seed) + drift * i / 1000
        for i in range(1000)
    ]


REFERENCES = {"eager": noisy(0), "again": noisy(1), "in halves": noisy(2)}


def test_a_curve_like_the_others_is_inside():
    judged = curves.judge(noisy(3), REFERENCES, 50)
    assert judged.inside
    assert not judged.repeats
    assert len(judged.pairs) == 3


@pytest.mark.parametrize("other", [noisy(3, drift=0.2), noisy(3, size=0.2)])
def test_a_curve_that_drifts_or_swings_is_not(other):
    assert not curves.judge(other, REFERENCES, 50).inside


def test_where_references_agree_to_the_bit_only_rounding_is_allowed():
    same = dict.fromkeys(("eager", "again", "in halves"), noisy(0))
    assert curves.judge([x + 1e-6 for x in noisy(0)], same, 50).inside
    judged = curves.judge([x + 1e-3 for x in noisy(0)], same, 50)
    assert judged.repeats
    assert not judged.inside
    assert judged.ours.largest == pytest.approx(1e-3)


def test_smoothing_takes_whole_windows():
    assert curves.smoothed([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]


def test_memory_is_flat_or_not_and_unknown_with_one_look():
    looks = [
        {"step": step, "allocated": at, "reserved": 2**30}
        for step, at in ((50, 0), (100, 2**30), (150, 2**30), (200, 2**30 + 2**20))
    ]
    grown = curves.growth(looks, 100)
    assert grown == {"allocated": 2**20, "reserved": 0}
    assert curves.flat(grown)
    assert not curves.flat(curves.growth(looks, 50))
    assert curves.growth(looks[-1:], 100) is None
