"""Megatron's command line with our flags; needs megatron.training, so Python 3.12."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dynaflow_train.config import Recipe
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
if sys.version_info < (3, 12):
    found = ".".join(map(str, sys.version_info[:3]))
    pytest.skip(f"megatron.training needs Python 3.12, found {found}", allow_module_level=True)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = str(Path(__file__).with_name("pretrain.py"))
FLAGS = shlex.split("""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 4 --transformer-impl local --mock-data
--tokenizer-type NullTokenizer --vocab-size 64 --train-iters 2 --lr 1e-3
--no-masked-softmax-fusion --no-persist-layer-norm
--disable-bias-linear --normalization RMSNorm --swiglu --use-cpu-initialization
--hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size 2 --no-rope-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --position-embedding-type rope""")
OURS = ["--dynaflow-strategy", "dual_batch", "--dynaflow-micro-batches", "2"]


def launched(rank: int, lines: list[list[str]], folder: str) -> list[dict[str, Any]]:
    """The launcher with each command line: exit status, what it wrote, what it said."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    from dynaflow_train import launch
    from tests.megatron import cpu

    cpu.install()
    out = Path(folder, f"{rank}.json")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", MEGATRON_TEST_OUT=str(out))
    results = []
    logger = logging.getLogger("dynaflow_train.integrations.megatron")
    for line in lines:
        logged = io.StringIO()
        logger.handlers = [logging.StreamHandler(logged)]
        out.unlink(missing_ok=True)
        printed, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
            try:
                status = launch.main(["--megatron", SCRIPT, *FLAGS, *line])
            except SystemExit as stop:  # --help
                status = stop.code
        parallel_state.destroy_model_parallel()
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        results.append(
            {
                "status": status,
                "wrote": json.loads(out.read_text()) if out.exists() else None,
                "printed": printed.getvalue(),
                "logged": logged.getvalue(),
                "complained": complained.getvalue(),
            }
        )
    return results


def test_losses_are_megatrons_and_the_flags_are_shown(tmp_path):
    options = {"strategy": "dual_batch", "batch_dim": 1, "host": "megatron", "executor": "eager"}
    stack, layers = tmp_path / "stack.yaml", tmp_path / "layers.yaml"
    Recipe(**options).dump(stack)
    Recipe(**options, region="layer").dump(layers)
    apart = "--no-gradient-accumulation-fusion"
    lines = [
        [apart],
        ["--dynaflow-recipe", str(stack)],
        ["--dynaflow-recipe", str(layers), "--dynaflow-verify", "--sequence-parallel", apart],
        ["--help"],
    ]
    for rank, results in enumerate(run_ranks(launched, 2, lines, str(tmp_path))):
        plain, ours, layer, usage = results
        assert [r["status"] for r in results] == [0] * 4, ours["complained"] + layer["complained"]
        assert plain["wrote"]["plans"] == []
        for each in (ours, layer):
            assert each["wrote"]["plans"] == ["dual_batch backward 2", "dual_batch forward 2"]
            assert each["wrote"]["losses"] == pytest.approx(plain["wrote"]["losses"], rel=1e-5)
        added = [r["wrote"]["added_to_main_grad"] for r in (plain, ours, layer)]
        assert added == [0, 2 * 6, 0]  # without --no-gradient-accumulation-fusion
        assert layer["wrote"]["sequence_parallel"]
        said = re.search(
            r"scheduled and plain: loss (\S+); worst of (\d+) gradients (\S+)", layer["logged"]
        )
        assert said, layer["logged"]
        assert max(float(said[1]), float(said[3])) < 1e-5
        assert int(said[2]) == 2 * 6 + 2  # two layers, the tied embedding, the last norm
        assert "--dynaflow-micro-batches N" in usage["printed"]
        assert "dual_batch" in usage["printed"].partition("--dynaflow-strategy")[2]
        if rank == 0:
            assert f"dynaflow_recipe ................................. {stack}" in ours["printed"]


WRONG = [
    (["--dynaflow-micro-batches", "2"], "--dynaflow-micro-batches without --dynaflow-strategy"),
    (["--dynaflow-strategy", "dual_bach"], "no strategy 'dual_bach'. Did you mean 'dual_batch'?"),
    (["--dynaflow-strategy", "sequential", *OURS[2:]], "'sequential' does not cut the batch"),
    ([*OURS[:3], "8"], "--dynaflow-micro-batches 8: --micro-batch-size 4 holds fewer"),
    ([*OURS, "--dynaflow-recipe", "r.yaml"], "--dynaflow-recipe excludes --dynaflow-strategy"),
    ([*OURS, "--tp-comm-overlap"], "leave --tp-comm-overlap out"),
    ([*OURS, "--overlap-moe-expert-parallel-comm"], "leave --overlap-moe-expert-parallel-comm out"),
    ([*OURS, "--transformer-impl", "transformer_engine"], "pass --transformer-impl local"),
    ([*OURS, "--reset-attention-mask"], "--reset-attention-mask gives each sample a mask"),
    (
        [*OURS, "--recompute-granularity", "full", "--recompute-method", "uniform"],
        "pass --dynaflow-region layer",
    ),
]


def test_wrong_flags_are_refused_by_name_and_nothing_runs(tmp_path):
    alone = ["--tensor-model-parallel-size", "1"]
    lines = [[*alone, *line] for line, _ in WRONG]
    (results,) = run_ranks(launched, 1, lines, str(tmp_path))
    for result, (line, words) in zip(results, WRONG, strict=True):
        assert result["status"] == 2, line
        assert result["complained"].count("[rank 0] dynaflow launch: ") == 1
        assert words in result["complained"]
        assert result["wrote"] is None
