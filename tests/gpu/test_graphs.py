"""Replayed CUDA graphs, collectives included, against the same steps run launch by launch."""

from __future__ import annotations

import itertools

import pytest
import torch

import dynaflow_train as df
from tests.gpu.test_engine import SMALL, build, prepare, step, worst
from tests.ranks import run_ranks

STEPS = 30


def replay(rank):
    """Worst errors against fp32 eager over steps on changing data, and what was recorded."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, mesh, inputs, gradient = prepare(rank, SMALL, torch.bfloat16)
    found = {}
    for strategy, region in itertools.product(("sequential", "dual_batch"), ("model", "layer")):
        exact = build(SMALL, device, torch.bfloat16, mesh=mesh).float()
        plain = build(SMALL, device, torch.bfloat16, mesh=mesh)
        model = build(SMALL, device, torch.bfloat16, mesh=mesh)
        df.compile(model, strategy, region=region, cuda_graphs=True)
        errors, allowed = [], []
        for seed in range(STEPS):
            torch.manual_seed(seed)
            embeds = torch.randn_like(inputs["inputs_embeds"])
            given = {**inputs, "inputs_embeds": embeds.detach().requires_grad_()}
            wide = {**inputs, "inputs_embeds": embeds.detach().float().requires_grad_()}
            truth = step(exact, wide, gradient)
            allowed.append(worst(step(plain, given, gradient), truth))
            errors.append(worst(step(model, given, gradient), truth))
        graphs = [used.graphs for used in df.plans(model)]
        found[strategy, region] = max(errors), max(allowed), graphs
    return found


@pytest.mark.multigpu(2)
@pytest.mark.timeout(400)
def test_replays_equal_the_plain_run():
    for found in run_ranks(replay, 2, backend="nccl", timeout_s=390):
        for name, (error, allowed, graphs) in found.items():
            number = "1 CUDA graph," if name[1] == "model" else f"{SMALL.layers} CUDA graphs,"
            assert error <= 2 * allowed + 1e-4, (name, error, allowed)
            assert graphs, name
            assert all(text.startswith(number) for text in graphs), (name, graphs)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_memory_stays_flat_and_replays_are_the_same():
    device, _, inputs, gradient = prepare(0, SMALL, torch.bfloat16, sharded=False)
    model = build(SMALL, device, torch.bfloat16)
    df.compile(model, "dual_batch", cuda_graphs=True)
    for _ in range(8):
        first = step(model, inputs, gradient)
    last = step(model, inputs, gradient)  # both are held from here on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        last = step(model, inputs, gradient)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert worst(last, first) < 1e-2
