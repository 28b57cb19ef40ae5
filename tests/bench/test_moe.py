"""Cases with experts: all variants have eager's gradients; skewed routing is the models' own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynaflow_train.benchmarks import moe, variants
from dynaflow_train.benchmarks.cases import CASES
from dynaflow_train.benchmarks.job import Job
from dynaflow_train.benchmarks.measure import CaseRun
from tests.ranks import run_ranks

NAMES = ("tiny-mixtral",)  # test_gradients.py has the others on more ranks


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen-moe"])
def test_a_biased_router_without_bias_is_the_models_own(name):
    case = CASES[name]
    model = moe.build(case, torch.device("cpu"), torch.float32)
    router = model.get_submodule("layers.0.mlp.gate")
    hidden = torch.randn(16, case.hidden)
    for mine, its in zip(
        moe._biased(router, torch.zeros(case.experts), hidden), router(hidden), strict=True
    ):
        torch.testing.assert_close(mine, its)


def measured(rank):
    job = Job(
        NAMES, ("comm_overlap", "dual_batch"), "gloo", "cpu", 2, 2, "eager", ablation=False,
        cold=False, limit_s=60.0, out="",
    )  # fmt: skip
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    store = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    return [CaseRun(name, job, torch.device("cpu"), mesh, store).measure() for name in NAMES]


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_measure_layers_with_experts():
    for found in run_ranks(measured, 2)[0]:
        ran = {"eager", "compile", "comm_overlap", "dual_batch", "compile, no collectives"}
        assert (set(found["variants"]), found["failed"]) == (ran, {})
        errors = [each["gradient_error"] for each in found["variants"].values()]
        assert all(error is None or error < 1e-5 for error in errors)
        assert found["routing"].startswith("rows at each rank's experts, over the mean: ")
        assert "it shards dense layers" in found["skipped"]["dtensor_sp"]


def test_what_experts_cannot_run_says_why():
    lines = ["flux", "dual_batch+graph", "dual_batch", "dual_batch+copies", "dual_batch+reserve=8"]
    found = variants.variants(lines, experts=True)
    idle = {each.name: each.idle for each in found if each.kind == "ours"}
    assert "it fuses collectives of dense layers" in idle["flux"]
    assert "no CUDA graph can hold" in idle["dual_batch+graph"]
    assert idle["dual_batch+copies"] == "the copy engine carries no all-to-all of rows"
    assert idle["dual_batch"] == idle["dual_batch+reserve=8"] == ""
    (dense,) = (each for each in variants.variants(lines[-1:]) if each.kind == "ours")
    assert dense.idle == "products of experts leave SMs free, here are none"
