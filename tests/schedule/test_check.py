from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynaflow_train.clocks import input_launches
from dynaflow_train.errors import ScheduleError
from dynaflow_train.ir import Launch, Plan
from dynaflow_train.schedule.check import check, check_collectives
from dynaflow_train.schedule.record import record
from dynaflow_train.schedule.text import dumps, loads
from dynaflow_train.strategies import get
from dynaflow_train.strategy import Context
from tests.schedule.regions import AnySchedule, dags, llama_forward

FORWARD = Context("forward", batch=6, tokens=6)
REGION = llama_forward(1)
PLAN = record(get("dual_batch"), REGION, FORWARD)
seeds, parts = st.integers(0, 2**32), st.integers(1, 4)


def changed(plan: Plan, at: int, **fields) -> Plan:
    launches = list(plan.launches)
    launches[at] = replace(launches[at], **fields)
    return replace(plan, launches=tuple(launches))


def moved(plan: Plan, source: int, target: int) -> Plan:
    """The launch at `source` earlier, at `target`; waits point where they did or go."""
    order = list(range(len(plan.launches)))
    order.insert(target, order.pop(source))
    place = {old: new for new, old in enumerate(order)}
    launches = []
    for new, old in enumerate(order):
        waits = (place[wait] for wait in plan.launches[old].waits)
        launches.append(replace(plan.launches[old], waits=tuple(w for w in waits if w < new)))
    return replace(plan, launches=tuple(launches))


@settings(max_examples=300, deadline=None)
@given(dags(), seeds, parts)
def test_every_random_legal_schedule_is_accepted_and_survives_text(region, seed, number):
    plan = record(AnySchedule(seed, number), region, FORWARD)
    check(plan, region, batch=6)
    assert loads(dumps(plan)) == plan
    assert plan == record(AnySchedule(seed, number), region, FORWARD)


@settings(max_examples=300, deadline=None)
@given(dags(), seeds, parts, st.data())
def test_every_random_illegal_change_is_refused(region, seed, number, data):
    plan = record(AnySchedule(seed, number), region, FORWARD)
    launches = plan.launches
    at = data.draw(st.integers(0, len(launches) - 1))
    kind = data.draw(
        st.sampled_from(["drop", "repeat", "early", "wait", "unknown", "part", "cycle"])
    )
    if kind == "drop":
        bad = replace(
            plan,
            launches=tuple(
                replace(each, waits=tuple(w - (w > at) for w in each.waits if w != at))
                for i, each in enumerate(launches)
                if i != at
            ),
        )
    elif kind == "repeat":
        bad = replace(plan, launches=(*launches, replace(launches[at], waits=(at,))))
    elif kind == "early":
        sources = input_launches(plan, region)[at]
        assume(sources)
        bad = moved(plan, at, data.draw(st.integers(0, max(sources))))
    elif kind == "wait":
        assume(launches[at].waits)
        gone = data.draw(st.sampled_from(launches[at].waits))
        bad = changed(plan, at, waits=tuple(w for w in launches[at].waits if w != gone))
    elif kind == "unknown":
        bad = changed(plan, at, ops=("nothing",))
    elif kind == "part":
        bad = changed(plan, at, micro_batches=(*launches[at].micro_batches, number))
    else:
        later = data.draw(st.integers(at, len(launches)))
        bad = changed(plan, at, waits=(*launches[at].waits, later))
    with pytest.raises(ScheduleError, match="<-- here"):
        check(bad, region)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(PLAN, launches=PLAN.launches[:-1]), r"mlp_add\[1\] is missing from the plan"),
        (
            replace(PLAN, launches=(*PLAN.launches, PLAN.launches[0])),
            r"_norm\[0\] was issued before, at 0",
        ),
        (
            moved(PLAN, 1, 0),
            r"position 0: layers.0.self_attn runs before its input .*_norm\[0\], which is at 1, 3",
        ),
        (
            changed(PLAN, 2, waits=()),
            "on comm reads layers.0.self_attn of position 1 on compute without a wait",
        ),
        (changed(PLAN, 2, waits=(9,)), "position 2: it waits for position 9, which does not come"),
        (changed(PLAN, 0, ops=("layers.7.mlp",)), "layers.7.mlp is no op of model forward"),
        (changed(PLAN, 0, micro_batches=(2,)), r"micro-batches \[2\]; the plan has 2, from 0 on"),
        (changed(PLAN, 0, micro_batches=()), r"micro-batches \[\]; the plan has 2"),
        (changed(PLAN, 0, micro_batches=(1, 0)), r"merges micro-batches \[1, 0\], not adjacent"),
        (changed(PLAN, 0, ops=PLAN.launches[0].ops * 2), "several ops without a kernel"),
        (replace(PLAN, sizes=(3, 4)), r"\[3, 4\] samples make 7, the batch 6"),
        (replace(PLAN, sizes=(6, 0)), r"\[6, 0\] samples: each needs at least one"),
        (replace(PLAN, sizes=()), "each needs at least one"),
        (replace(PLAN, phase="backward"), "a backward plan was given to a forward region"),
    ],
)
def test_each_refusal_says_what_and_where(bad, message):
    with pytest.raises(ScheduleError, match=message) as error:
        check(bad, REGION, batch=6, rank=3)
    assert str(error.value).startswith("rank 3, model forward, position ")
    assert "came from strategy 'dual_batch'; 'sequential' is always valid." in str(error.value)
    arrows = [line for line in str(error.value).splitlines() if line.endswith("<-- here")]
    assert len(arrows) == 1
    position = str(error.value).split("position ")[1].split(":")[0]
    assert arrows[0].split()[0] == position


def test_a_region_that_cannot_be_cut_takes_no_split_plan():
    region = replace(REGION, can_split=False, why_not="sorts the batch")
    with pytest.raises(
        ScheduleError, match="2 micro-batches of a region that cannot be cut: sorts the batch"
    ):
        check(PLAN, region)


def test_a_merged_op_runs_once_for_all():
    ops = tuple(replace(op, merged=op.name == "layers.0.mlp") for op in REGION.ops)
    with pytest.raises(ScheduleError, match=r"layers.0.mlp runs once for all 2 .* here for \[0\]"):
        check(PLAN, replace(REGION, ops=ops))


def test_collectives_in_another_order_on_another_rank_are_refused():
    check_collectives({0: PLAN, 1: PLAN}, REGION)
    reduces = [i for i, launch in enumerate(PLAN.launches) if launch.stream == "comm"]
    launches = list(PLAN.launches)
    one, other = reduces[:2]
    launches[one], launches[other] = launches[other], launches[one]
    swapped = replace(PLAN, launches=tuple(launches))
    with pytest.raises(ScheduleError) as error:
        check_collectives({0: PLAN, 1: PLAN, 2: swapped}, REGION)
    message = str(error.value)
    assert "rank 2 issues layers.0.self_attn.all_reduce[1] on group tp where rank 0" in message
    assert "<-- rank 2" in message.splitlines()[1 + one]
    fewer = replace(PLAN, launches=PLAN.launches[: reduces[-1]])
    with pytest.raises(ScheduleError, match="rank 1 issues nothing more on group tp"):
        check_collectives({0: PLAN, 1: fewer}, REGION)


def test_collectives_of_two_groups_may_interleave_as_each_group_keeps_its_order():
    ops = tuple(
        replace(op, group="dp") if op.name == "layers.0.mlp.all_reduce" else op for op in REGION.ops
    )
    region = replace(REGION, ops=ops)
    reduces = [launch for launch in PLAN.launches if launch.stream == "comm"]
    other = replace(PLAN, launches=(*reduces[2:], *reduces[:2]))
    same = replace(PLAN, launches=tuple(reduces))
    check_collectives({0: same, 1: other}, region)
    with pytest.raises(ScheduleError, match="on group tp"):
        check_collectives({0: same, 1: other}, REGION)


def test_a_fused_chain_is_legal_and_its_order_is_checked():
    a, b = REGION.ops[0].name, REGION.ops[1].name
    rest = tuple(Launch((op.name,), (0,)) for op in REGION.ops[2:])
    good = Plan("s", "model", "forward", (6,), (Launch((a, b), (0,), kernel="k"), *rest))
    check(good, REGION)
    with pytest.raises(ScheduleError, match="self_attn runs before its input"):
        check(changed(good, 0, ops=(b, a)), REGION)
