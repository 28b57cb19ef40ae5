"""Dense kernels between two processes, Triton interpreted: values, lateness, and what waits buy."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

from dynaflow_train.benchmarks import dense_checks as checks
from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import all_reduce_rms_norm as arn
from dynaflow_train.overlap_kernels import matmul_all_reduce as mar
from dynaflow_train.overlap_kernels.pool import Pool
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
LATE_S = 0.3


def ask(_: str, text: str) -> list[str]:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def group() -> str:
    return dist.group.WORLD.group_name


def random_shapes(rank: int, number: int) -> dict[str, list[str]]:
    """By kernel, what is wrong; a rank in five is late."""
    pool, world = Pool(CPU, ask, patience_s=60), dist.get_world_size()
    found = {}
    for kernel in (*checks.KERNELS[:2], *checks.KERNELS[3 if world > 2 else 2 :]):
        cases = [checks.draw(kernel, seed, small=True) for seed in range(number)]
        cases = [each for each in cases if world == 2 or each.tuning.shots or "rms" not in kernel]
        space = pool.take(kernel, group(), "x", max(checks.nbytes(c, world) for c in cases))
        wrong = [checks.wrong(case, rank, space, seed, 0.2) for seed, case in enumerate(cases)]
        wrong.append(checks.repeat_wrong(cases[0], rank, space, 10))
        found[kernel] = [each for each in wrong if each]
    assert len(pool.told()) == len(found)
    pool.close()
    assert not pool.told()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "number"), [(2, 12), (3, 6)])
def test_random_shapes_forward_and_backward(interpreted, world, number):
    for found in run_ranks(random_shapes, world, number, spawn=True):
        assert len(found) == (4 if world == 2 else 3)
        assert not any(found.values()), found


def without_waits(rank: int) -> list[tuple[str, bool, str]]:
    """Of each kernel whose rank 1 is late: what was asked, whether it came out, what is said."""
    told = []
    weight, norm = torch.ones(16), arn.Norm("rms")
    for name, shots in (("one", 1), ("two", 2), ("copies", 0), ("product", None)):
        for patience_s in (60.0, 1e-9):
            space = Pool(CPU, ask, patience_s).take(name, group(), "x", 4096)
            operand = torch.full((6, 16), float(rank + 1))
            space.view(rank, (6, 16), torch.float32).fill_(torch.nan)
            dist.barrier()
            if rank == 1:
                time.sleep(LATE_S)
            if shots is None:
                out = mar.matmul_all_reduce(space, operand, torch.eye(16))
            else:
                tuning = arn.Tuning(shots, 4)
                out = arn.all_reduce_norm(space, operand, None, (weight, None), norm, tuning).total
            right = bool((out == 3).all())
            try:
                space.check()
                said = ""
            except KernelError as error:
                said = str(error)
            told.append((name, patience_s > 1, right, said))
            dist.barrier()
    return told


def test_without_waiting_results_are_wrong_and_the_late_rank_is_named(interpreted):
    early, _ = run_ranks(without_waits, 2, spawn=True)
    for name, waits, right, said in early:
        assert right == waits, name
        if waits:
            assert said == ""
        else:
            assert f"kernel '{name}': rank 1 of group" in said
            assert "did not come within about" in said
            assert "says rank 0" in said


def refusals(rank: int) -> list[str]:
    """What is said of operands that do not fit."""
    del rank
    space = Pool(CPU, ask).take("k", group(), "x", 1024)
    said = []
    for call in (
        lambda: space.view(0, (300,), torch.float32),
        lambda: arn.all_reduce_norm(
            space, torch.ones(2, 4).int(), None, (None, None), arn.Norm("none"), arn.Tuning()
        ),
        lambda: mar.matmul_all_reduce(space, torch.ones(2), torch.ones(2, 2)),
        lambda: dataclasses.replace(space, host=torch.tensor([2])).check(),
    ):
        with pytest.raises(KernelError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_what_does_not_fit_is_refused_with_its_numbers():
    for large, kind, shape, late in run_ranks(refusals, 2):
        assert "needs 1200 bytes for [300] torch.float32, its buffer has 1024" in large
        assert "needs Triton on CUDA" in kind  # not interpreted here
        assert "sums matrices of 2 ranks; found 2 and [2] @ [2, 2]" in shape
        assert "kernel 'k': rank 1 of group" in late


def products(rank: int) -> list[str]:
    """Without Triton at all: copies and flags that the host reads."""
    pool = Pool(CPU, ask, patience_s=60)
    wrong = []
    for kernel in checks.KERNELS[:3]:
        cases = [checks.draw(kernel, seed, small=True) for seed in range(20)]
        space = pool.take(kernel, group(), "x", max(checks.nbytes(case, 2) for case in cases))
        wrong += [checks.wrong(case, rank, space, seed, 0.2) for seed, case in enumerate(cases)]
    return [each for each in wrong if each]


def test_products_need_no_triton():
    assert run_ranks(products, 2) == [[], []]
