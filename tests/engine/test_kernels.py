"""Kernels in place of ops and of chains of ops: found by name, bound to their graph, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.api import sessions
from dynaflow_train.errors import KernelError, ScheduleError
from dynaflow_train.overlap_kernels.registry import Plain, Registry, default_registry
from dynaflow_train.schedule.text import dumps, loads
from tests.engine.harness import Cut, Oracle, batch, compiled
from tests.engine.parallel import PARALLEL
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT
from tests.ranks import run_ranks

BLOCK, SMALL = SPLIT["block"], SPLIT["bias_free"]


class By(Cut):
    """Every op by one kernel, alone or with all micro-batches merged."""

    def __init__(self, kernel: str, *, merged: bool = False) -> None:
        super().__init__((3, 1))
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "merged", merged)

    def schedule(self, s):
        parts = s.split(None if s.context.forward_sizes else self.parts)
        while ready := s.get_ready_ops():
            op = ready[0]
            together = parts if self.merged and op.micro_batch else None
            s.execute(op, micro_batches=together, kernel=self.kernel)


class Chains(Cut):
    """Ops whose names stand in `chains`, one after another, by one kernel; others as they come."""

    rules = (df.SplitModule("norm1|norm2|mlp", optional=True),)

    def __init__(self, kernel: str, *chains: tuple[str, ...]) -> None:
        super().__init__(2)
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "chains", chains)

    def schedule(self, s):
        s.split(None if s.context.forward_sizes else self.parts)
        while ready := s.get_ready_ops():
            chains = [self.chain(s, ready[0], names) for names in self.chains]
            if found := next(filter(None, chains), None):
                s.execute(found, kernel=self.kernel)
            else:
                s.execute(ready[0])

    def chain(self, s, op, names):
        """The ops of these names, from `op` on, or None."""
        ops = [op]
        for name in names[1:]:
            ops += [reader for reader in s.readers(ops[-1]) if reader.op == name]
        return ops if tuple(each.op for each in ops) == names else None


@dataclass(frozen=True)
class Halving:
    """Plain torch, watched: what it was bound to and how often it ran; `factor` makes it wrong."""

    name: str = "halving"
    factor: float = 1.0
    graphs: list = field(default_factory=list)
    calls: list = field(default_factory=list)

    def can_run(self, graph):
        return None

    def bind(self, graph):
        self.graphs.append([getattr(n.target, "_opname", n.name) for n in graph.graph.nodes])

        def run(inputs):
            self.calls.append(len(inputs))
            return [x * self.factor if x.is_floating_point() else x for x in graph.forward(*inputs)]

        return run


@dataclass(frozen=True)
class Picky(Plain):
    """Refuses, by what its graph reads."""

    name: str = "picky"

    def can_run(self, graph):
        first = next(n for n in graph.graph.nodes if n.op == "placeholder").meta["val"]
        return f"needs bfloat16, found {first.dtype} {list(first.shape)}"


def with_kernel(strategy, kernel=None, case=BLOCK, **options):
    model = compiled(case, strategy, **options)
    if kernel is not None:
        sessions(model)[0].registry.add(kernel)
    return model


@pytest.fixture(scope="module")
def oracle():
    return Oracle(BLOCK, 4, torch.float32)


@pytest.mark.parametrize(
    ("merged", "engine"), [(False, "fast"), (True, "interpreter")], ids=["each", "merged"]
)
def test_every_op_by_the_plain_kernel(oracle, merged, engine):
    model = with_kernel(By("plain", merged=merged), engine=engine)
    oracle.check(step(model, batch(BLOCK, 4)))
    assert sessions(model)[0].compiler.compiled == 0
    for used in df.plans(model):
        assert used.plan.sizes == (3, 1)
        assert {launch.kernel for launch in used.plan.launches} == {"plain"}
        assert (used.plan.launches[0].micro_batches == (0, 1)) == merged
        assert str(used).count("kernel plain") == len(used.plan.launches)
        assert loads(dumps(used.plan)) == used.plan


CHAINS = (("norm1", "qkv"), ("norm2", "mlp", "forward"), ("norm2", "qkv", "norm1"))


def test_one_kernel_in_place_of_a_chain(oracle):
    kernel = Halving()
    model = with_kernel(Chains("halving", *CHAINS), kernel)
    oracle.check(step(model, batch(BLOCK, 4)))
    forward, backward = df.plans(model)
    found = [x.ops for used in (forward, backward) for x in used.plan.launches if x.kernel]
    assert [ops for ops in found if len(ops) > 1] == [c for c in CHAINS for _ in range(2)]
    assert "norm2 + mlp + forward" in str(forward)
    assert len(kernel.calls) == 6  # three chains, two micro-batches
    assert {"addmm", "rsqrt"} < set(kernel.graphs[0])  # norm1 and qkv in one graph
    assert sum(graph.count("erf") for graph in kernel.graphs) >= 2  # the MLP, for each
    for used in (forward, backward):
        assert loads(dumps(used.plan)) == used.plan


def test_it_is_the_kernels_own_result_that_counts():
    model = with_kernel(By("halving"), Halving(factor=0.5), case=SMALL)
    with pytest.raises(AssertionError, match="loss"):
        Oracle(SMALL, 4, torch.float32).check(step(model, batch(SMALL, 4)))


@pytest.mark.parametrize("kernel", ["plane", "PLAIN"])
def test_an_unknown_kernel_is_refused_with_the_nearest(kernel):
    model = with_kernel(By(kernel), case=SMALL)
    near = "Did you mean 'plain'. " if kernel == "plane" else ""
    with pytest.raises(
        KernelError, match=rf"no kernel '{kernel}' for \S+\. {near}There are plain, all_red"
    ):
        model(*batch(SMALL, 4))


def test_a_kernel_that_cannot_run_says_why():
    model = with_kernel(By("picky"), Picky(), case=SMALL)
    with pytest.raises(
        KernelError, match=r"'picky' cannot run here: needs bfloat16, found torch\.float32 \["
    ):
        model(*batch(SMALL, 4))


def test_several_ops_need_a_kernel():
    model = with_kernel(Chains(None, *CHAINS))
    with pytest.raises(ScheduleError, match=r"norm1\[0\] \+ qkv\[0\] are different ops\..*kernel="):
        model(*batch(BLOCK, 4))


def test_the_registry():
    registry = default_registry()
    assert list(registry.kernels) == [
        "plain", "all_reduce_rms_norm", "all_gather_matmul", "matmul_reduce_scatter",
        "matmul_all_reduce", "grouped_matmul",
    ]  # fmt: skip
    with pytest.raises(KernelError, match="'plain' is registered already"):
        registry.add(Plain())
    with pytest.raises(KernelError, match=r"no kernel 'flux'; there are: picky, plain\."):
        Registry({"plain": Plain(), "picky": Picky()}).find(
            "flux", torch.fx.symbolic_trace(torch.nn.Identity())
        )
    assert "picky" not in default_registry().kernels  # each session has its own


CHAIN = ("forward", "forward.all_gather", "forward.2")


def on_ranks(rank: int) -> list[object]:
    """A product, its collective and what follows, by one kernel."""
    del rank
    case, kernel = PARALLEL["gathered_head"], Halving()
    model = compiled(case, Chains("halving", CHAIN))
    sessions(model)[0].registry.add(kernel)
    Oracle(case, 4, torch.float32).check(step(model, batch(case, 4)))
    return [[x.ops for x in df.plans(model)[0].plan.launches], kernel.graphs]


@pytest.mark.dist
def test_a_kernel_replaces_a_collective_with_what_stands_around_it():
    for ops, graphs in run_ranks(on_ranks, 2):
        assert ops == [CHAIN, CHAIN]
        assert len(graphs) == 2
        for inside in graphs:
            at = inside.index("all_gather_into_tensor")
            assert inside[at + 1] == "wait_tensor"
            assert inside.index("mm") < at < inside.index("tanh")
