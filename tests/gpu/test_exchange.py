"""Collectives by the copy engine: against NCCL, and whole steps against fp32 eager."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
import torch.distributed as dist

import dynaflow_train as df
from dynaflow_train.config import environment
from dynaflow_train.execute.exchange import _Passed
from dynaflow_train.execute.meta import Meta
from dynaflow_train.execute.symmetric import Rings
from tests.engine.test_exchange import group_result
from tests.gpu.test_engine import SLEEP_CYCLES, SMALL, build, prepare, step, worst
from tests.ranks import cuda_of, run_ranks

SHAPES = 200
CALLS = 2000


def rings(device, chunks=1):
    """As a session makes them, on the ranks that there are."""

    def ask(_, text):
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        return texts

    def refuse(why):
        raise AssertionError(why)

    return Rings(device, environment(), ask, chunks, refuse)


def compare_with_nccl(rank):
    """Of random shapes, kinds and delays: how many differed."""
    torch.cuda.set_device(cuda_of(rank))
    device, world = cuda_of(rank), dist.get_world_size()
    group = dist.group.WORLD.group_name
    ring = rings(device).connect(group, "comm", 2, 2**20)
    same, own = random.Random(0), random.Random(rank)
    wrong = 0
    for number in range(SHAPES):
        kind = same.choice(("all_reduce", "all_gather", "reduce_scatter"))
        rows, width = world * same.randint(1, 64), same.randint(1, 500)
        dtype = same.choice((torch.bfloat16, torch.float32))
        operand = torch.randint(-8, 8, (rows, width), device=device).to(dtype)
        rows = {"all_gather": rows * world, "reduce_scatter": rows // world}.get(kind, rows)
        out = torch.empty(rows, width, dtype=dtype, device=device)
        wanted = group_result(kind, operand, out)
        meta = Meta.of(operand)
        if own.random() < 0.2:
            torch.cuda._sleep(SLEEP_CYCLES)
        ring.view(rank, number % 2, meta).copy_(operand)
        ring.collective(kind, number % 2, meta, last=True)(operand, out, False)
        wrong += not torch.equal(out, wanted)
    launch = ring.collective(
        "all_reduce", 0, meta := Meta.of(torch.ones(64, device=device)), last=True
    )
    for number in range(CALLS):
        ring.view(rank, 0, meta).fill_(number)
        launch(None, out := torch.empty(64, device=device), False)
    torch.cuda.synchronize()
    return wrong, float(out[0]) == world * (CALLS - 1)


@pytest.mark.multigpu(2)
@pytest.mark.timeout(200)
def test_they_equal_nccl_with_late_ranks():
    for wrong, lasts in run_ranks(compare_with_nccl, 2, backend="nccl", timeout_s=190):
        assert wrong == 0
        assert lasts


def products(rank):
    """Products all-reduced in parts that are late: how many differ, with waits and without."""
    torch.cuda.set_device(cuda_of(rank))
    device, group = cuda_of(rank), dist.group.WORLD.group_name
    ring = rings(device, 3).connect(group, "comm", 2, 2**20)
    comm, wrong = torch.cuda.Stream(), {}
    pick = random.Random(0)
    for waits, number, add in itertools.product((True, False), range(20), (True, False)):
        rows, inner = pick.randint(3, 200), 8 * pick.randint(1, 30)
        left = torch.randint(-4, 4, (rows, inner), device=device).to(torch.bfloat16)
        right = torch.randint(-1, 2, (inner, 96), device=device).to(torch.bfloat16)
        wanted = left @ right
        if add:
            dist.all_reduce(wanted)
        else:
            both = [torch.empty_like(wanted) for _ in range(2)]
            dist.all_gather(both, wanted)
            wanted = both[1 - rank]
        meta, out = Meta.of(wanted), torch.empty_like(wanted)
        made = ring if waits else dataclasses.replace(ring, event=_Passed)
        compute, launch = made.in_chunks(number % 2, meta, add=add, last=True)
        lent = ring.view(rank, number % 2, meta)
        lent.fill_(99)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        compute([left, right, lent])
        with torch.cuda.stream(comm):
            launch(None, out, False)
        torch.cuda.synchronize()
        wrong[waits] = wrong.get(waits, 0) + (not torch.equal(out, wanted))
    return wrong[True], wrong[False]


@pytest.mark.multigpu(2)
def test_parts_of_a_product_are_waited_for_one_by_one():
    for with_waits, without in run_ranks(products, 2, backend="nccl", timeout_s=150):
        assert with_waits == 0
        assert without > 0


def train(rank):
    """Worst errors against fp32 eager on changing data, plain bf16's own, and what is explained."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, mesh, inputs, gradient = prepare(rank, SMALL, torch.bfloat16)
    found = {}
    exact = build(SMALL, device, torch.bfloat16, mesh=mesh).float()
    plain = build(SMALL, device, torch.bfloat16, mesh=mesh)
    strategies = (("comm_overlap", 1), ("comm_overlap", 4), ("dual_batch", 2))
    for (strategy, chunks), graphs in itertools.product(strategies, (False, True)):
        model = build(SMALL, device, torch.bfloat16, mesh=mesh)
        options = {"transfer_chunks": chunks, "cuda_graphs": graphs, "strict": True}
        df.compile(model, strategy, transfer="copy_engine", **options)
        errors, allowed = [], []
        for seed in range(12):
            torch.manual_seed(seed)
            embeds = torch.randn_like(inputs["inputs_embeds"])
            given = {**inputs, "inputs_embeds": embeds.detach().requires_grad_()}
            wide = {**inputs, "inputs_embeds": embeds.detach().float().requires_grad_()}
            truth = step(exact, wide, gradient)
            allowed.append(worst(step(plain, given, gradient), truth))
            errors.append(worst(step(model, given, gradient), truth))
        copies = sum(sum(used.copies.values()) for used in df.plans(model))
        found[strategy, chunks, graphs] = (
            max(errors),
            max(allowed),
            copies,
            df.explain(model).transfers,
        )
    return found


@pytest.mark.multigpu(2)
@pytest.mark.timeout(300)
def test_steps_equal_the_plain_run():
    for found in run_ranks(train, 2, backend="nccl", timeout_s=290):
        for name, (error, allowed, copies, transfers) in found.items():
            assert error <= 2 * allowed + 1e-4, (name, error, allowed)
            assert copies == 0, name
            assert transfers, name
            assert all("by the copy engine," in line for line in transfers), transfers
