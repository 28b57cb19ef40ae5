"""Strategies over two ranks: collectives beside compute, equal to the plain parallel run."""

from __future__ import annotations

import pytest
import torch

import dynaflow_train as df
from tests.engine.harness import Oracle, Switch, batch, compiled, merged_ops, plain, quiet, step
from tests.engine.modules import Block
from tests.engine.parallel import PARALLEL
from tests.engine.test_zoo import BATCH, STRATEGIES
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def every_strategy(rank: int, name: str, dtype: torch.dtype, region: str) -> list[object]:
    del rank
    case, switch = PARALLEL[name], Switch()
    oracle, inputs = Oracle(case, BATCH, dtype), batch(case, BATCH, dtype)
    model = compiled(case, switch, dtype, region=region)
    for label, strategy in STRATEGIES.items():
        switch.use(strategy)
        with quiet():
            oracle.check(step(model, inputs), f"{name} {label}")
    used = df.plans(model)
    streams = {
        s
        for u in used
        for launch in u.plan.launches
        if u.region.op[launch.ops[0]].is_communication
        for s in [launch.stream]
    }
    kinds = sorted({op.collective for u in used for op in u.region.ops if op.collective})
    return [kinds, "comm" in streams, merged_ops(model), {len(u.plan.sizes) for u in used}]


COLLECTIVES = {
    "fg": ["all_reduce"],
    "sp": ["all_gather", "reduce_scatter"],
    "gathered_head": ["all_gather", "all_reduce", "reduce_scatter"],
    "gathered_rows": ["all_gather", "reduce_scatter"],
    "shared_norm": ["all_reduce"],
}


@pytest.mark.parametrize("region", ["model", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PARALLEL)
def test_every_strategy_on_two_ranks_equals_the_plain_run(name, dtype, region):
    if region == "layer" and name not in ("fg", "sp"):
        pytest.skip("one region either way: it has 0 layers")
    for kinds, on_comm, merged, cut in run_ranks(every_strategy, 2, name, dtype, region):
        assert kinds == COLLECTIVES[name]
        assert on_comm
        assert cut == {1, 2, 3, 4}
        if name != "shared_norm":  # the sum over samples comes before the sum over ranks
            assert merged == {}


def sharded_and_whole(rank: int) -> float:
    """The largest error of the plain parallel stack against the unsharded one."""
    model = plain(PARALLEL["fg"])
    inputs = batch(PARALLEL["fg"], BATCH)
    torch.manual_seed(7)
    whole = torch.nn.Sequential(*(Block() for _ in range(2)))
    found, wanted = step(model, inputs).tensors, step(whole, inputs).tensors
    pairs = [(found[k], wanted[k]) for k in ("loss", "output 0", "gradient of input 0")]
    for i in range(2):
        up, full = (found[f"gradient of layers.{i}.up"], wanted[f"gradient of {i}.mlp.0.weight"])
        pairs.append((up, full.chunk(2)[rank]))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def test_the_parallel_stack_is_the_unsharded_one():
    assert max(run_ranks(sharded_and_whole, 2)) < 1e-5


def measured_calls(rank: int, name: str) -> list[object]:
    del rank
    case = PARALLEL[name]
    oracle, inputs = Oracle(case, BATCH, torch.float32), batch(case, BATCH)
    model = compiled(case, "dual_batch")
    for _ in range(4):
        oracle.check(step(model, inputs), name)
    found = [c for each in df.explain(model) for c in each.collectives]
    return [len(found), all(c.ms >= 0 and c.hidden_ms <= c.ms for c in found)]


@pytest.mark.parametrize("name", ["fg", "sp"])
def test_the_measured_call_is_exact_and_times_every_collective(name):
    for number, sensible in run_ranks(measured_calls, 2, name):
        # phases, layers, micro-batches; a sum, or a gather and a scatter, for each of two blocks
        assert number == 2 * 2 * 2 * (2 if name == "fg" else 4)
        assert sensible
