"""A script that knows nothing of dynaflow_train: sharded, compiled, the unsharded losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import Trainer

from dynaflow_train.config import Recipe
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.hf import launching
from tests.hf.models import build
from tests.hf.trainers import losses, tensor_parallel_environment, trainer
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def trained(rank: int, recipe: dict[str, Any], schedule: bool, folder: str) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    del rank
    tensor_parallel_environment(2)
    undo = launching.apply(Recipe(**recipe), schedule=schedule)
    try:
        ours = trainer(build("llama"), folder)
        ours.train()
    finally:
        undo()
    weight = ours.model.model.layers[0].mlp.up_proj.weight
    return {
        "losses": losses(ours),
        "sharded": isinstance(weight, DTensor) and weight.to_local().shape[0] == 24,
        "hidden": [e.get("hidden_share") for e in ours.state.log_history if "loss" in e],
    }


@pytest.mark.dist
@pytest.mark.parametrize("schedule", [True, False])
def test_two_processes_give_the_losses_of_one(tmp_path, schedule):
    alone = trainer(build("llama"), tmp_path / "alone")
    alone.train()
    recipe = {"strategy": "dual_batch", "executor": "eager", "host": "hf"}
    for found in run_ranks(trained, 2, recipe, schedule, str(tmp_path)):
        assert found["sharded"]
        assert found["losses"] == pytest.approx(losses(alone), rel=1e-5)
        measured = [share for share in found["hidden"] if share is not None]
        assert bool(measured) == schedule
        assert all(0 <= share <= 1 for share in measured)


def refused(rank: int, recipe: dict[str, Any], model: str, folder: str) -> str:
    del rank
    tensor_parallel_environment(2)
    undo = launching.apply(Recipe(**recipe))
    try:
        trainer(build(model), folder)
    except UnsupportedError as error:
        return str(error)
    finally:
        undo()
    return "accepted"


@pytest.mark.dist
def test_qwen3_with_the_hosts_plan_is_refused_on_every_rank(tmp_path):
    recipe = {"strategy": "sequential", "host": "hf", "tensor_parallel": "host"}
    first, second = run_ranks(refused, 2, recipe, "qwen3", str(tmp_path))
    assert "sums the accumulated gradient once per micro-step" in first
    assert first == second


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2)])
def test_a_model_that_cannot_be_sharded_is_refused(monkeypatch, model):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(UnsupportedError, match="tensor parallelism over 2 ranks needs Trainer"):
        launching.shard(model, Recipe("sequential"))


def test_everything_is_put_back_and_an_unused_recipe_is_told():
    before = Trainer.__init__, ParallelismConfig._validate_accelerator
    undo = launching.apply(Recipe("dual_batch", host="hf"))
    assert Trainer.__init__ is not before[0]
    with pytest.warns(UserWarning, match="made no transformers.Trainer, so recipe 'dual_batch'"):
        undo()
    assert (Trainer.__init__, ParallelismConfig._validate_accelerator) == before


def test_old_accelerate_is_refused(monkeypatch):
    monkeypatch.setattr(launching.accelerate, "__version__", "1.14.2")
    with pytest.raises(UnsupportedError, match=r"accelerate 1\.15 up to 1\.x, found 1\.14\.2"):
        launching.apply(Recipe("sequential"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_main_job_runs_and_writes_its_files(tmp_path):
    small = ["--steps", "5", "--batch", "4", "--length", "32", "--hidden", "64", "--layers", "2"]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "recipes/demo/run.py"), *small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "worst relative gradient error" in ran.stdout
    assert all((tmp_path / "demo_out" / name).exists() for name in ("plan.txt", "trace.json"))
    assert (tmp_path / "demo_out" / "timeline.png").stat().st_size > 10_000
