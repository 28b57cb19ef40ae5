"""What is turned off is off and changes no gradient; torch's own sequence parallelism is right."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.codecache import PyCodeCache

from dynaflow_train import api
from dynaflow_train.benchmarks import dtensor, profiling, variants
from dynaflow_train.benchmarks.cases import CASES
from dynaflow_train.benchmarks.steps import Batch, Clock
from tests.collectives import CountCollectives
from tests.ranks import run_ranks

LINES = ("dual_batch", "dual_batch+copied", "dual_batch+recompiled")


def bed_of(ranks: int, layers: int = 2) -> variants.Bed:
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    device, case = torch.device("cpu"), dataclasses.replace(CASES["tiny"], layers=layers)
    bed = variants.Bed(case, device, torch.float32, mesh, "eager", Clock(device))
    torch.manual_seed(1)
    inputs = case.inputs(device, torch.float32)
    bed.batch = Batch(inputs, torch.randn_like(inputs["inputs_embeds"]))
    return bed


def gradients(step: Any) -> list[torch.Tensor]:
    return [each.clone() for each in step.gradients()]


def ablated(rank: int) -> dict[str, Any]:
    del rank
    bed, found, plain = bed_of(1, layers=1), {}, []
    for line in LINES:
        step = variants.ours(bed, line)
        mine = gradients(step)
        plain = plain or mine
        equal = all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))
        (session,) = api.sessions(step.model)
        copied = profiling.copies(profiling.record(step, bed.clock), 4).count
        found[line] = (equal, session.compiler.reused, copied)
    return found


@pytest.mark.dist
def test_what_is_turned_off_is_off_and_changes_no_gradient():
    (found,) = run_ranks(ablated, 1)
    assert all(equal for equal, *_ in found.values())
    reused = {line: reused for line, (_, reused, _) in found.items()}
    assert reused["dual_batch+recompiled"] == 0 < reused["dual_batch"]
    copies = {line: copied for line, (*_, copied) in found.items()}
    assert copies["dual_batch+copied"] > copies["dual_batch"]


def sequence_parallel(rank: int) -> tuple[float, int, str]:
    del rank
    bed = bed_of(2)
    plain = gradients(variants.eager(bed))
    step = dtensor.step(bed, pipelined=False)
    pairs = list(zip(plain, gradients(step), strict=True))
    return max(float((a - b).norm() / a.norm()) for a, b in pairs), len(pairs), step.says


@pytest.mark.dist
def test_torchs_sequence_parallelism_gives_the_gradients_of_eager():
    for off, number, says in run_ranks(sequence_parallel, 2):
        assert off < 1e-5
        assert (number, says) == (20, "")


def in_parts(rank: int) -> tuple[float, int, int]:
    del rank
    plain, bed = gradients(variants.eager(bed_of(2))), bed_of(2)
    bed.in_parts = True
    step = variants.eager(bed)
    pairs = list(zip(plain, gradients(step), strict=True))
    counts = []
    for model in (step.model, bed.bare()):
        with CountCollectives() as seen:
            model(**bed.batch.inputs)
        counts.append(seen.counts.total())
    return max(float((a - b).norm() / a.norm()) for a, b in pairs), *counts


@pytest.mark.dist
def test_hf_sp_has_the_gradients_of_hf_and_can_run_without_collectives():
    for off, there, bare in run_ranks(in_parts, 2):
        assert off < 1e-5
        assert (there, bare) == (2 * 4 + 1, 0)  # forward: 2 layers, and the last's join


def test_async_tp_is_read_off_the_code_that_was_loaded(monkeypatch, tmp_path):
    code = "buf = torch.ops.symm_mem.fused_all_gather_matmul.default(a, [w])\n"
    module = types.ModuleType("generated")
    module.__file__ = str(tmp_path / "generated.py")
    (tmp_path / "generated.py").write_text(code * 2 + "mm(a, b)  # all_gather_into_tensor\n")
    monkeypatch.setattr(PyCodeCache, "modules", [module])
    found = dtensor.fused_calls(dtensor._loaded())
    assert found == {"fused_all_gather_matmul": 2}
    assert dtensor.fused_calls([]) == {}
