from __future__ import annotations

import pytest

from dynaflow_train.report import explain
from dynaflow_train.schedule.record import record
from dynaflow_train.schedule.simulate import simulate
from dynaflow_train.strategies import get
from dynaflow_train.strategy import Context
from tests.schedule.regions import Builder, llama_backward, llama_forward

FORWARD = Context("forward", batch=4, tokens=4096)


def explained(strategy, region, times=None, context=FORWARD, **fields):
    plan = record(strategy, region, context)
    return explain(plan, region, simulate(plan, region, times), **fields)


def test_hidden_and_exposed_milliseconds_add_up_and_the_table_shows_them():
    region = llama_forward(1)
    times = {op.name: (3.0 if op.is_communication else 2.0) for op in region.ops}
    found = explained(get("dual_batch"), region, times, copied=[("layers.0.mlp:0", 4096)])
    # compute launches take 1 ms, collectives 1.5 ms: streams of 2 + 2 launches between collectives
    rows = [(each.micro_batches, each.ms, each.hidden_ms) for each in found.collectives]
    assert rows == [((0,), 1.5, 1.5), ((1,), 1.5, 1.5), ((0,), 1.5, 1.5), ((1,), 1.5, 1.0)]
    assert (found.ms, found.hidden_ms, found.wall_ms) == (6.0, 5.5, 12.5)
    assert found.hidden_share == pytest.approx(5.5 / 6)
    lines = str(found).splitlines()
    assert lines[0] == "model forward: dual_batch, micro-batches [2, 2], 12.500 ms"
    assert lines[1].split() == [
        "collective", "micro-batch", "ms", "hidden", "exposed", "why", "exposed",
    ]  # fmt: skip
    assert lines[5].split()[:5] == ["layers.0.mlp.all_reduce", "1", "1.500", "1.000", "0.500"]
    assert lines[5].endswith("last collective; the compute beside it is shorter")
    assert lines[6].split() == ["total", "6.000", "5.500", "0.500", "92%", "hidden"]
    assert lines[7] == "bytes copied: layers.0.mlp:0 4,096"
    assert lines[2].index("1.500") == lines[5].index("1.500")


def first_and_last():
    build = Builder("forward")
    gathered = build.add("gather", "x", collective="all_gather", bytes=10**8)
    made = build.add("mlp", gathered, flops=10**11)
    return build.region(build.add("reduce", made, collective="reduce_scatter", bytes=10**8))


def reasons(found):
    return [each.reason for each in found.collectives]


def test_each_exposed_collective_says_why():
    sequential = explained(get("sequential"), llama_forward(1))
    assert reasons(sequential)[0] == "sequential: all compute is on its stream, 'compute'"
    few = explained(get("dual_batch", min_tokens=8192), llama_forward(1))
    assert reasons(few)[0] == "sequential: 4096 tokens < min_tokens=8192"
    one = explained(get("comm_overlap"), llama_forward(1))
    assert reasons(one) == [
        "only one micro-batch: no compute is independent of it",
        "last collective; only one micro-batch: no compute is independent of it",
    ]
    assert reasons(explained(get("comm_overlap"), first_and_last())) == [
        "first op of the region; only one micro-batch: no compute is independent of it",
        "last collective; no compute follows",
    ]
    context = Context("backward", 4, 4096, forward_sizes=(4,))
    backward = explained(get("comm_overlap"), llama_backward(1, comm_bytes=10**10), None, context)
    assert reasons(backward)[0] == "the compute beside it is shorter"
    assert backward.collectives[0].hidden_ms == pytest.approx(500e9 / 4e11)


def test_a_schedule_that_does_not_use_what_it_could_names_the_next_op():
    from dynaflow_train.strategy import Strategy

    class OneAfterTheOther(Strategy):
        def schedule(self, s):
            for part in s.split(2):
                while ready := s.get_ready_ops(part):
                    s.execute(ready[0])

    found = explained(OneAfterTheOther(), llama_forward(1))
    assert reasons(found)[0] == (
        "nothing independent was ready: next is layers.0.self_attn_add[0], which needs it"
    )


def test_without_collectives_all_is_hidden_and_nothing_divides_by_zero():
    build = Builder("forward")
    found = explained(get("sequential"), build.region(build.add("mlp", "x", flops=4 * 10**11)))
    assert found.collectives == ()
    assert (found.hidden_share, found.wall_ms) == (1.0, 1.0)
    assert str(found).splitlines()[-1] == "bytes copied: 0"
