"""The shipped recipes: each is read, and accelerate reads the config that stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaflow_train.cli import main
from dynaflow_train.config import Recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(
    path for path in FOLDER.glob("*.yaml") if not path.name.endswith(".accelerate.yaml")
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_says_what_it_is_for(path, capsys):
    assert main(["check", str(path)]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith(Recipe.load(path).description)
    assert len(Recipe.load(path).description) > 20


FOR_MEGATRON = [path for path in RECIPES if Recipe.load(path).host == "megatron"]


@pytest.mark.parametrize("path", FOR_MEGATRON, ids=lambda path: path.stem)
def test_megatrons_recipes_cut_its_batch_dimension_and_say_their_command(path):
    assert Recipe.load(path).batch_dim == 1
    command = path.read_text().partition("\ndescription")[0].replace("\\\n#", "")
    assert "-m dynaflow_train.launch --megatron pretrain_gpt.py" in command
    assert f"--dynaflow-recipe recipes/{path.name}" in command


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p not in FOR_MEGATRON], ids=lambda path: path.stem
)
def test_accelerate_reads_the_config_beside_it(path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    beside = path.with_suffix(".accelerate.yaml")
    config = config_args.load_config_from_file(str(beside))
    assert config.num_processes == 2
    shared = {} if "_ep2" in path.stem else {"parallelism_config_tp_size": 2}
    assert (config.parallelism_config or {}) == shared
    assert Recipe.load(path).expert_parallel == (2 if "_ep2" in path.stem else 1)
    command = path.read_text().partition("\ndescription")[0].replace("\\\n#", "")
    assert f"--config_file recipes/{beside.name}" in command
    assert f"--recipe recipes/{path.name}" in command


def test_there_are_recipes():
    assert "llama_tp2" in {path.stem for path in RECIPES}
