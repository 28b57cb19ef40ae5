"""Rows of the scaling run have the unsplit run's gradients, on 4 and 8 ranks; wrong ones are found.

Few variants of each case: a strategy costs every rank three seconds of one core.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynaflow_train.benchmarks import gradients, scaling_rows, variants
from dynaflow_train.benchmarks.job import Job
from dynaflow_train.benchmarks.measure import CaseRun
from dynaflow_train.benchmarks.steps import Batch, PlainStep
from tests.ranks import run_ranks

ROWS = {row.name: row for row in scaling_rows.rows("cpu")}
BOTH = {"eager", "dual_batch"}
FOUR = (("tp2-dp2-8b", BOTH), ("ep4-qwen-moe-skewed", BOTH))  # row, what of it runs
EIGHT = (("tp8-8b", {"eager"}), ("tp2-dp4-8b", {"eager"}), ("ep8-mixtral-skewed", BOTH))


def case_run(name: str, copies: int) -> CaseRun:
    ranks = dist.get_world_size()
    job = Job(
        (name,), ("dual_batch",), "gloo", "cpu", ranks, 2, "eager", ablation=False, cold=False,
        limit_s=100.0, out="", copies=copies, check=True,
    )  # fmt: skip
    shape = (copies, ranks // copies)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    store = dist.PrefixStore(f"{name}{copies}", dist.distributed_c10d._get_default_store())
    return CaseRun(name, job, torch.device("cpu"), mesh["tp"], store, mesh["dp"])


def checked(rank, rows):
    del rank
    found = []
    for name, names in rows:
        assert ROWS[name].ranks == dist.get_world_size()
        run = case_run(ROWS[name].case, ROWS[name].copies)
        run._prepare_all(run._bed(), [each for each in run._variants() if each.name in names])
        found.append((set(run.running), run.failed))
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rows"), [(4, FOUR), (8, EIGHT)])
def test_gradients_are_those_of_the_unsplit_run(ranks, rows):
    for found in run_ranks(checked, ranks, rows):
        assert found == [(names, {}) for _, names in rows]


def wrong(rank):
    del rank
    run = case_run("tiny", 2)
    bed = run._bed()
    step = variants.eager(bed)
    expected = gradients.reference(bed, step)
    alone = PlainStep(bed.made(), Batch(bed.batch.inputs, bed.batch.gradient), bed.clock)
    fine = [each.clone() for each in step.gradients()]
    steps = {"right": fine, "not averaged": alone.gradients(), "one short": fine[:-1]}
    steps["off"] = [*fine[:-1], fine[-1] * (1 + 1e-4)]
    return {name: expected.wrong(each) for name, each in steps.items()}


@pytest.mark.dist
def test_wrong_gradients_are_found():
    for found in run_ranks(wrong, 4):
        assert found["right"] == ""
        assert "q_proj.weight is off by" in found["not averaged"]
        assert found["one short"] == "gradients are wrong: 19 instead of 20"
        assert found["off"].startswith(
            "gradients are wrong: norm.weight is off by 0.0001 of the un"
        )


def taken_out(rank):
    del rank
    run = case_run("tiny", 1)
    found = variants.Variant("spoilt", lambda bed: Spoilt(bed.sharded(), bed.batch, bed.clock))
    eager = variants.Variant("eager", variants.eager)
    run._prepare_all(run._bed(), [eager, found])
    return set(run.running), run.failed


class Spoilt(PlainStep):
    """What it finds is 1% too much on rank 1."""

    def gradients(self):
        return [each * (1 + 0.01 * dist.get_rank()) for each in super().gradients()]


@pytest.mark.dist
def test_a_variant_with_wrong_gradients_on_one_rank_is_taken_out_on_all():
    for running, failed in run_ranks(taken_out, 2):
        assert running == {"eager"}
        assert failed["spoilt"].startswith("rank 1: gradients are wrong: input is off by 0.01 of")
