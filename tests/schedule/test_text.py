from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaflow_train.errors import ScheduleError
from dynaflow_train.ir import Launch, Plan
from dynaflow_train.schedule.text import dumps, loads, plan_hash, show
from tests.schedule.regions import llama_forward

PLAN = Plan(
    "dual_batch",
    "model",
    "forward",
    (2, 1),
    (
        Launch(("layers.0.self_attn",), (0,)),
        Launch(("layers.0.self_attn.all_reduce", "add"), (0, 1), "comm", "reduce_add", (0,)),
        Launch(("mlp",), (1,), "compute", None, (0, 1)),
    ),
    reason="a batch of 3, cut <unevenly>\n100%",
)
TEXT = """\
strategy dual_batch
region   model
phase    forward
sizes    2 1
reason   a batch of 3, cut <unevenly>%0A100%25
   0  compute  0    layers.0.self_attn
   1  comm     0,1  layers.0.self_attn.all_reduce + add  kernel reduce_add  after 0
   2  compute  1    mlp                                                     after 0,1
"""

words = st.text(min_size=1, max_size=8)
numbers = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
plans = st.builds(
    Plan,
    words,
    words,
    st.sampled_from(["forward", "backward", "inference"]),
    numbers,
    st.lists(
        st.builds(
            Launch,
            st.lists(words, min_size=1, max_size=3).map(tuple),
            numbers,
            words,
            st.none() | words,
            st.just(()) | numbers,
        ),
        max_size=4,
    ).map(tuple),
    st.none() | words,
)


def test_the_text_is_one_aligned_line_a_launch():
    assert dumps(PLAN) == TEXT
    assert loads(TEXT) == PLAN


def test_a_reason_keeps_its_blanks():
    for reason in (" ", " a b ", "a b"):
        plan = replace(PLAN, reason=reason)
        assert loads(dumps(plan)) == plan


@given(plans)
def test_any_plan_loads_back_equal_whatever_its_names_hold(plan):
    assert loads(dumps(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT + "   3  compute  x  mlp\n", r"line 9 of a plan's text cannot be read: '   3  comp"),
        (TEXT.replace("phase", "face"), "lacks its header line.s. phase"),
        ("", "phase, region, sizes, strategy"),
    ],
)
def test_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        loads(text)


def test_show_puts_the_arrow_at_the_line_and_cuts_long_plans():
    assert show(PLAN.launches).splitlines() == TEXT.splitlines()[5:]
    assert show(PLAN.launches, 1).splitlines()[1].endswith("after 0    <-- here")
    assert show(PLAN.launches, 3, "ended").splitlines()[3].split() == ["3", "...", "<--", "ended"]
    long = show(PLAN.launches * 100, 150).splitlines()
    assert long[0] == "      (138 launches before)"
    assert long[-1] == "      (137 launches after)"
    assert long[13].startswith(" 150  compute")
    assert long[13].endswith("<-- here")
    assert len(long) == 27


def test_the_hash_covers_plan_and_graph():
    region = llama_forward(1)
    first = plan_hash(PLAN, region)
    assert len(first) == 64
    assert plan_hash(PLAN, llama_forward(1)) == first
    assert plan_hash(replace(PLAN, sizes=(1, 2)), region) != first
    assert plan_hash(PLAN, llama_forward(2)) != first
