from __future__ import annotations

import dataclasses

import pytest

from dynaflow_train.errors import KernelError, ScheduleError, SplitError
from dynaflow_train.ir import Value
from dynaflow_train.schedule.record import record
from dynaflow_train.strategy import Context, MicroBatch, Scheduler, Strategy
from tests.schedule.regions import Builder, llama_backward, llama_forward

FORWARD = Context("forward", batch=5, tokens=5 * 128)


def two_branches():
    """x -> a, b; a -> c (merged); b, c -> d."""
    build = Builder("forward")
    a = build.add("a", "x", flops=4 * 10**11)
    b = build.add("b", "x")
    c = build.add("c", a, merged=True)
    return build.region(build.add("d", b, c))


def shown(ready):
    return [str(op) for op in ready]


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [(1, (5,)), (2, (3, 2)), (3, (2, 2, 1)), (4, (2, 1, 1, 1)), ([1, 4], (1, 4)), ([5], (5,))],
)
def test_split_gives_even_parts_larger_first_or_the_sizes_asked_for(parts, sizes):
    s = Scheduler(two_branches(), FORWARD)
    assert s.split(parts) == tuple(MicroBatch(i, size) for i, size in enumerate(sizes))
    assert s.sizes == sizes


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (6, r"batch of 5 sample\(s\) into 6 micro-batches. Set micro_batches to at most 5"),
        (0, r"batch of 5 sample\(s\) into 0"),
        ([], r"into 0 micro-batches"),
        (5, r"into 5 micro-batches: the capture has room for 4. .*max_micro_batches to at least 5"),
        ([2, 2], r"\[2, 2\] samples make 4, the batch has 5"),
        ([5, 0], r"at least 1 that add up to 5"),
        (None, "in the forward|In the forward give the number"),
    ],
)
def test_split_refuses_with_numbers_and_the_cure(parts, message):
    with pytest.raises(SplitError, match=message):
        Scheduler(two_branches(), FORWARD).split(parts)


def test_split_is_called_once_and_first():
    s = Scheduler(two_branches(), FORWARD)
    s.split(2)
    with pytest.raises(ScheduleError, match="called twice"):
        s.split(2)
    s = Scheduler(two_branches(), FORWARD)
    s.execute(s.get_ready_ops()[0])
    with pytest.raises(ScheduleError, match="after the first execute"):
        s.split(2)


def test_the_backward_splits_as_its_forward_did():
    context = Context("backward", 5, 640, forward_sizes=(4, 1))
    region = llama_backward(1)
    assert Scheduler(region, context).sizes == (4, 1)
    assert [part.size for part in Scheduler(region, context).split()] == [4, 1]
    assert [part.size for part in Scheduler(region, context).split([4, 1])] == [4, 1]
    with pytest.raises(
        SplitError, match=r"forward of model ran with .*\[4, 1\].*asks for \[3, 2\]"
    ):
        Scheduler(region, context).split(2)


def test_readiness_follows_the_graph_and_merged_ops_need_every_micro_batch():
    s = Scheduler(two_branches(), FORWARD)
    first, second = s.split(2)
    assert shown(s.get_ready_ops()) == ["a[0]", "a[1]", "b[0]", "b[1]"]
    assert shown(s.get_ready_ops(second)) == ["a[1]", "b[1]"]
    a0, a1, b0, b1 = s.get_ready_ops()
    s.execute(a1)
    s.execute(b0)
    assert shown(s.get_ready_ops()) == ["a[0]", "b[1]"]
    s.execute(a0)
    assert shown(s.get_ready_ops()) == ["b[1]", "c"]
    s.execute(s.get_ready_ops()[1])
    assert shown(s.get_ready_ops()) == ["b[1]", "d[0]"]
    s.execute(b1)
    assert shown(s.get_ready_ops(first)) == ["d[0]"]
    assert shown(s.readers(a0)) == ["c"]
    assert shown(s.readers(b1)) == ["d[1]"]
    assert s.remaining == 2


def test_a_ready_op_tells_its_share_of_the_measured_or_estimated_time():
    region = two_branches()
    s = Scheduler(region, dataclasses.replace(FORWARD, times={"b": 10.0}))
    s.split([4, 1])
    a0, a1, b0, b1 = s.get_ready_ops()
    assert [op.estimated_ms for op in (a0, a1, b0, b1)] == pytest.approx([0.8, 0.2, 8.0, 2.0])
    assert (a0.kind, a0.phase, a0.is_wgrad, a0.is_communication) == (
        "compute",
        "forward",
        False,
        False,
    )


def test_merged_runs_take_adjacent_micro_batches_of_one_op():
    region = two_branches()
    s = Scheduler(region, FORWARD)
    first, second, third = s.split(3)
    a0, a1, a2, b0, *_ = s.get_ready_ops()
    with pytest.raises(
        ScheduleError, match=r"merged for micro-batches \[0, 2\], which are not adj"
    ):
        s.execute((a0, a2))
    with pytest.raises(
        ScheduleError, match=r"merged for micro-batches \[0, 2\], which are not adj"
    ):
        s.execute(a0, micro_batches=(first, third))
    with pytest.raises(ScheduleError, match="are different ops.*need kernel="):
        s.execute((a0, b0))
    with pytest.raises(ScheduleError, match="not the micro-batches of this split"):
        s.execute(a0, micro_batches=(MicroBatch(3, 1),))
    s.execute((a1, a2))
    s.execute(b0, micro_batches=(second, first))
    assert [(launch.ops, launch.micro_batches) for launch in s.launches] == [
        (("a",), (1, 2)),
        (("b",), (0, 1)),
    ]
    with pytest.raises(ScheduleError, match=r"a\[1\] was issued before, at position 0"):
        s.execute(a1)
    s.execute(a0)
    (c,) = (op for op in s.get_ready_ops() if op.op == "c")
    with pytest.raises(ScheduleError, match=r"c runs once for all 3 micro-batches, not \[0, 1\]"):
        s.execute(c, micro_batches=(first, second))
    s.execute(c)
    assert s.launches[-1].micro_batches == (0, 1, 2)


def test_a_chain_of_ops_takes_one_kernel_and_default_streams_follow_the_kind():
    region = llama_forward(1)
    s = Scheduler(region, FORWARD, kernels=("reduce_add",))
    while (op := s.get_ready_ops()[0]).collective is None:
        s.execute(op)
    (add,) = s.readers(op)
    with pytest.raises(KernelError, match="Did you mean 'reduce_add'"):
        s.execute((op, add), kernel="reduce_ad")
    with pytest.raises(ScheduleError, match=r"_add\[0\] is not ready: it reads .*all_reduce\[0\]"):
        s.execute(add)
    s.execute((op, add), kernel="reduce_add")
    assert [launch.stream for launch in s.launches] == ["compute", "compute", "comm"]
    assert s.launches[-1].kernel == "reduce_add"
    assert len(s.launches[-1].ops) == 2


def test_a_stale_op_is_refused():
    s = Scheduler(two_branches(), FORWARD)
    stale = s.get_ready_ops()[0]
    s.split(2)
    with pytest.raises(ScheduleError, match=r"a\[0\] is no op of model forward .*\[3, 2\]"):
        s.execute(stale)


def test_start_and_lead_follow_the_estimates_of_what_was_issued():
    region = llama_forward(1)
    times = {op.name: 4.0 if op.is_communication else 2.0 for op in region.ops}
    s = Scheduler(region, Context("forward", batch=4, tokens=4, times=times))
    first, second = s.split(2)
    norm0, norm1 = s.get_ready_ops()
    # a norm and attention, then the all_reduce, all halved
    assert [s.lead(op) for op in (norm0, norm1)] == [(2.0, 2.0), (2.0, 2.0)]
    for _ in range(3):  # norm, attention, all_reduce: 1 + 1 + 2 ms
        s.execute(s.get_ready_ops(first)[0])
    (add0,), (norm1,) = s.get_ready_ops(first), s.get_ready_ops(second)
    assert (s.start_ms(add0), s.start_ms(norm1), s.start_ms(norm1, "copy")) == (4.0, 2.0, 0.0)
    assert s.lead(add0) == (3.0, 2.0)
    assert (s.waits_for(add0), s.waits_for(norm1)) == (2, -1)
    s.execute(norm1)
    assert (s.start_ms(add0), s.start_ms(*s.get_ready_ops(second))) == (4.0, 3.0)
    s.execute(s.get_ready_ops(second)[0])
    assert s.start_ms(add0) == 4.0
    assert s.waits_for(add0) == -1  # it has ended, by the measured times


def test_without_measured_times_a_collective_is_under_way_until_something_reads_it():
    s = Scheduler(llama_forward(1, comm_bytes=1), FORWARD)
    first, second = s.split(2)
    for part in (first, second):
        for _ in range(3):
            s.execute(s.get_ready_ops(part)[0])
    add0, add1 = s.get_ready_ops()
    assert (s.waits_for(add0), s.waits_for(add1)) == (2, 5)
    s.execute(add1)
    assert s.waits_for(add0) == -1  # collectives of one stream end in order


def test_what_no_collective_needs_has_no_lead():
    s = Scheduler(two_branches(), FORWARD)
    assert {s.lead(op) for op in s.get_ready_ops()} == {(float("inf"), 0.0)}


class Unpacks(Strategy):
    def schedule(self, s):
        _first, _second = s.split(2)
        s.sequential()


class Sequential(Strategy):
    def schedule(self, s):
        s.split(2)
        s.execute(s.get_ready_ops()[1], stream="copy")
        s.sequential("nothing to gain")


def test_sequential_issues_the_rest_in_region_order_on_one_stream():
    plan = record(Sequential(), two_branches(), FORWARD)
    assert [(*launch.ops, *launch.micro_batches) for launch in plan.launches] == [
        ("a", 1), ("a", 0), ("b", 0), ("b", 1), ("c", 0, 1), ("d", 0), ("d", 1),
    ]  # fmt: skip
    assert plan.streams == ("copy", "compute")
    assert plan.reason == "nothing to gain"
    assert [launch.waits for launch in plan.launches] == [(), (), (), (), (0,), (), ()]


def test_a_region_that_cannot_be_cut_runs_whole_and_says_why():
    region = llama_forward(1, can_split=False, why_not="mixes samples in softmax, model.py:7")
    plan = record(Unpacks(), region, FORWARD)
    assert plan.sizes == (5,)
    assert plan.reason == "mixes samples in softmax, model.py:7"
    assert len(plan.launches) == len(region.ops)
    s = Scheduler(region, FORWARD)
    assert s.split(2) == (MicroBatch(0, 5),)


@pytest.mark.parametrize("put_back", [False, True])
def test_strict_refuses_what_mixes_samples_unless_no_sample_waits_for_it(put_back):
    b = Builder("forward")
    x = b.add("block", "x")
    mean = b.add("mean", x, sharing="shared", merged=True, reason="it reduces over the batch")
    loss = b.add("loss", mean, sharing="shared", merged=True)
    y = b.add("more", x, *([loss] if put_back else []))
    region = b.region(y, loss)
    assert len(record(Unpacks(), region, FORWARD, strict=False).sizes) == 2
    if put_back:
        with pytest.raises(SplitError, match="strict: mean would run merged for all 2"):
            record(Unpacks(), region, FORWARD)
    else:
        record(Unpacks(), region, FORWARD)


@pytest.mark.parametrize("saved", [False, True])
def test_strict_takes_what_is_made_of_saved_statistics(saved):
    b = Builder("backward")
    b.values["sum"] = Value("sum", "partial")
    x = b.add("block", "x")
    row = b.add("rows", "sum" if saved else x, merged=True, reason="it needs a sum over the batch")
    region = b.region(b.add("more", x, row))
    if saved:
        assert len(record(Unpacks(), region, FORWARD).sizes) == 2
    else:
        with pytest.raises(SplitError, match="strict: rows would run merged"):
            record(Unpacks(), region, FORWARD)


def test_a_batch_too_small_is_an_error_or_a_sequential_plan():
    context = Context("forward", batch=1, tokens=128)
    with pytest.raises(SplitError, match="batch of 1"):
        record(Unpacks(), two_branches(), context)
    plan = record(Unpacks(), two_branches(), context, strict=False)
    assert plan.sizes == (1,)
    assert plan.reason is not None
    assert "batch of 1 sample(s) into 2" in plan.reason


class Stops(Strategy):
    def schedule(self, s):
        for op in s.get_ready_ops():
            s.execute(op)


class Raises(Strategy):
    def schedule(self, s):
        s.execute(s.get_ready_ops()[0])
        s.nothing()  # type: ignore[attr-defined]


class Repeats(Strategy):
    def schedule(self, s):
        op = s.get_ready_ops()[0]
        s.execute(op)
        s.execute(op)


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (Stops, ["ended with 2 runs not issued; ready were c", "   2  ...", "<-- ended here"]),
        (Raises, ["raised AttributeError", "after 1 launches", "   1  ...", "<-- raised here"]),
        (Repeats, ["a[0] was issued before, at position 0", "<-- here"]),
    ],
)
def test_a_wrong_strategy_sees_its_plan_with_an_arrow(strategy, parts):
    with pytest.raises(ScheduleError) as error:
        record(strategy(), two_branches(), FORWARD)
    for part in [
        *parts,
        f"strategy {strategy.name!r}, model forward",
        "'sequential' is always valid",
    ]:
        assert part in str(error.value)


def test_a_strategy_without_schedule_says_so():
    class Empty(Strategy):
        pass

    assert Empty.name == "empty"
    with pytest.raises(ScheduleError, match=r"Empty must define schedule\(self, s\)"):
        record(Empty(), two_branches(), FORWARD)
