"""`dynaflow bench --host megatron`, rehearsed: what runs on GPUs runs here, but for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

STRATEGIES = ("dual_batch",)


def measured(rank: int) -> dict[str, Any]:
    from dynaflow_train.benchmarks.job import Job
    from dynaflow_train.benchmarks.measure import CaseRun
    from tests.megatron import cpu

    del rank
    cpu.install()
    from megatron.core.fusions import fused_softmax

    mask = torch.ones(16, 16).triu(1).bool()  # Megatron's own is made on CUDA
    fused_softmax.get_default_causal_mask = lambda tokens: mask[:tokens, :tokens]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    store = torch.distributed.PrefixStore(
        "bench", torch.distributed.distributed_c10d._get_default_store()
    )
    given = (("tiny",), STRATEGIES, "gloo", "cpu", 2, 2, "eager")
    job = Job(*given, ablation=False, cold=False, limit_s=60.0, out="", host="megatron-sp")
    return CaseRun("tiny", job, torch.device("cpu"), mesh, store).measure()


def test_every_variant_runs_and_gives_megatrons_gradients():
    for one in run_ranks(measured, 2, timeout_s=280):
        assert one["failed"] == {}
        ran = one["variants"]
        assert set(ran) == {"eager", "compile", *STRATEGIES, "compile, no collectives"}
        assert set(one["skipped"]) == {"compile+graph", "compile+graph, no collectives"}
        for name in ("compile", *STRATEGIES):
            assert ran[name]["gradient_error"] < 1e-5, name
        assert "ran uncut" not in ran["dual_batch"]["says"]
