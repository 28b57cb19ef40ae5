"""Experts over ranks, their products by the registry's kernel: the unsharded step's gradients."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_train as df
from dynaflow_train import strategies
from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import grouped_kernel
from dynaflow_train.strategy import Strategy
from tests.engine.harness import Switch, quiet
from tests.kernels.test_grouped_matmul import interpreter
from tests.moe.block import inputs, make, ours
from tests.moe.test_experts import ROUTINGS, steps
from tests.ranks import run_ranks

EXPERTS, K, SIZE = 8, 2, 3


class ByKernel(Strategy):
    """Two micro-batches; what holds a grouped product by the kernel, all else as it comes."""

    def schedule(self, s):
        s.split(None if s.context.forward_sizes else 2)
        while ready := s.get_ready_ops():
            graph = s._region.op[ready[0].op].graph.graph
            grouped = any(str(node.target) in grouped_kernel.REPLACED for node in graph.nodes)
            s.execute(ready[0], kernel="grouped_matmul" if grouped else None)


def counted(found: list[str]) -> None:
    """Note which products are made; this process runs nothing else."""
    products = grouped_kernel._products()
    run = products.run

    def noted(name: str, *given: Any) -> Any:
        found.append(f"{name} by {type(given[3]).__name__}")
        return run(name, *given)

    products.run = noted


def on_rank(rank: int) -> tuple[list[tuple[float, str]], dict[str, set[str]], list[str]]:
    model = make(EXPERTS, K).shard()
    switch, made, found = Switch(*strategies.get("dual_batch").rules), [], []
    counted(made)
    df.compile(model, switch, executor="eager")
    for name, favoured in ROUTINGS.items():
        given = inputs(SIZE, EXPERTS, seed=len(name), favoured=favoured)
        found += [(e, f"{name}, {w}") for e, w in steps(model, switch, rank, given, [ByKernel()])]
    kernels: dict[str, set[str]] = {}
    for used in df.plans(model):
        by = {x.ops[0] for x in used.plan.launches if x.kernel == "grouped_matmul"}
        kernels.setdefault(used.plan.phase, set()).update(by)
    return found, kernels, made


@pytest.mark.dist
@interpreter
def test_experts_by_the_kernel_give_the_unsharded_step(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for found, kernels, made in run_ranks(on_rank, 2, spawn=True, timeout_s=120):
        for excess, where in found:
            assert excess <= 1, where
        assert len(found) == len(ROUTINGS)
        assert kernels["forward"], kernels
        assert kernels["backward"], kernels
        assert {"forward by Tiling", "wgrad by Tiling"} == set(made)


def refused(rank: int) -> str:
    given = inputs(SIZE, EXPERTS, seed=1)
    model = df.compile(make(EXPERTS, K).shard(), ByKernel(), executor="eager")
    with quiet(), pytest.raises(KernelError) as raised:
        ours(model, given, rank)
    return str(raised.value)


@pytest.mark.dist
def test_without_the_interpreter_a_cpu_is_told_why():
    for text in run_ranks(refused, 2):
        assert text == (
            "kernel 'grouped_matmul' cannot run here: on the CPU it needs Triton's interpreter."
        )
