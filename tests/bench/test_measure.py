"""A variant that fails is dropped on all ranks, with its reason; the others go on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynaflow_train.benchmarks.job import Job
from dynaflow_train.benchmarks.measure import CaseRun
from dynaflow_train.benchmarks.variants import EAGER, Variant, eager
from tests.ranks import run_ranks


def broken(bed):
    raise RuntimeError(f"no room for {bed.case.name} on rank {dist.get_rank()}")


def prepare(rank):
    job = Job(
        ("tiny",),
        (),
        "gloo",
        "cpu",
        2,
        5,
        "eager",
        ablation=False,
        cold=False,
        limit_s=20.0,
        out="",
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    store = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    run = CaseRun("tiny", job, torch.device("cpu"), mesh, store)
    bed = run._bed()
    for variant in (Variant("broken", broken, warmups=0), Variant(EAGER, eager, warmups=0)):
        run._prepare(variant, bed)
    return run.failed, list(run.running)


@pytest.mark.dist
def test_a_variant_fails_alone_and_on_all_ranks():
    for failed, running in run_ranks(prepare, 2):
        assert failed == {"broken": "rank 0: RuntimeError: no room for tiny on rank 0"}
        assert running == [EAGER]
