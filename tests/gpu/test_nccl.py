"""Communicators of a stream's own: values, graphs, thread blocks, priority."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from dynaflow_train import api
from tests.gpu.test_engine import SMALL, build, entries, prepare, step, worst
from tests.ranks import run_ranks

CTAS = 4
LIMITED = {"comm": {"max_ctas": CTAS, "priority": "high"}}
STEPS = 8  # a graph is recorded after three


def compare(rank):
    """Worst errors against fp32 eager, the error of plain bf16, and what explain and graphs say."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, mesh, inputs, gradient = prepare(rank, SMALL, torch.bfloat16)
    wide = {"inputs_embeds": inputs["inputs_embeds"].detach().float().requires_grad_()}
    exact = build(SMALL, device, torch.bfloat16, mesh=mesh).float()
    truth = step(exact, wide, gradient)
    plain = worst(step(build(SMALL, device, torch.bfloat16, mesh=mesh), inputs, gradient), truth)
    found = {}
    for strategy, graphs in itertools.product(("comm_overlap", "dual_batch"), (False, True)):
        model = build(SMALL, device, torch.bfloat16, mesh=mesh)
        df.compile(model, strategy, nccl=LIMITED, cuda_graphs=graphs)
        errors = [worst(step(model, inputs, gradient), truth) for _ in range(STEPS)]
        recorded = [used.graphs for used in df.plans(model)]
        (made,) = [set(one.groups.made.values()) for one in api.sessions(model)]
        said = df.explain(model).nccl
        found[strategy, graphs] = max(errors), recorded, len(made - {None}), said
    return plain, found


@pytest.mark.multigpu(2)
@pytest.mark.timeout(400)
def test_values_are_those_of_eager_within_the_error_of_bf16():
    for plain, found in run_ranks(compare, 2, backend="nccl", timeout_s=390):
        for name, (error, recorded, made, said) in found.items():
            assert error <= 2 * plain + 1e-4, (name, error, plain)
            assert made == 1, name
            text = f"a communicator of its own, max_ctas {CTAS}, priority high"
            assert said == (f"nccl, stream 'comm': {text}",)
            if name[1]:
                assert all(each.startswith("1 CUDA graph,") for each in recorded), (name, recorded)
            else:
                assert recorded == [None, None]


def blocks(rank, nccl):
    """Thread blocks of each NCCL kernel of a step, and the priorities of comm's streams."""
    device, mesh, inputs, gradient = prepare(rank, SMALL, torch.bfloat16)
    model = build(SMALL, device, torch.bfloat16, mesh=mesh)
    df.compile(model, "comm_overlap", nccl=nccl)
    for _ in range(4):
        step(model, inputs, gradient)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step(model, inputs, gradient)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    grids = [
        each["args"]["grid"][0]
        for each in events
        if each.get("cat") == "kernel" and "ncclDevKernel" in each["name"]
    ]
    return grids, {entry.lanes.streams["comm"].priority for entry in entries(model)}


@pytest.mark.multigpu(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("priority", "expected"), [("high", {-1}), ("normal", {0})])
def test_kernels_have_no_more_blocks_and_streams_the_priority(priority, expected):
    nccl = {"comm": {"max_ctas": 2, "priority": priority}}
    for grids, priorities in run_ranks(blocks, 2, nccl, backend="nccl", timeout_s=290):
        assert grids, "the step communicates"
        assert max(grids) <= 2
        assert priorities == expected
