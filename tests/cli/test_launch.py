"""The launcher: what the script sees, what is refused, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import sys

import pytest

from dynaflow_train import launch
from dynaflow_train.config import exported_recipe

SCRIPT = """
import json, os, pathlib, sys
import beside
seen = [__name__, sys.argv, os.environ["DYNAFLOW_RECIPE"], beside.VALUE]
pathlib.Path(sys.argv[1]).write_text(json.dumps(seen))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    return str(path)


def test_script_runs_as_main_with_its_own_arguments(script, tmp_path):
    before = sys.argv, list(sys.path), dict(os.environ)
    out = tmp_path / "out.json"
    with exported_recipe(tmp_path / "r.yaml"):
        launch.run(script, [str(out), "--lr", "0.1"])
    assert json.loads(out.read_text()) == [
        "__main__",
        [script, str(out), "--lr", "0.1"],
        str(tmp_path / "r.yaml"),
        5,
    ]
    assert (sys.argv, sys.path, dict(os.environ)) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("strategy: dual_batch\nhots: hf\n", "unknown key 'hots'. Did you mean 'host'?"),
        ("strategy: dual_bach\nhost: hf\n", "no strategy 'dual_bach'"),
        ("strategy: dual_batch\n", "the launcher needs a recipe with a host ('host: hf')"),
        (
            "strategy: dual_batch\nhost: megatron\n",
            "--megatron pretrain_gpt.py ... --dynaflow-recipe",
        ),
    ],
)
def test_wrong_recipe_names_the_rank_and_runs_nothing(
    script, tmp_path, monkeypatch, capsys, content, words
):
    monkeypatch.setenv("RANK", "1")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(content)
    out = tmp_path / "out.json"
    assert launch.main(["--recipe", str(recipe), script, str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("[rank 1] dynaflow launch: ")
    assert words in err
    assert not out.exists()
