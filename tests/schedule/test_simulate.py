from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaflow_train.clocks import input_launches
from dynaflow_train.ir import Interval, Launch, Plan
from dynaflow_train.report import exposed_spans
from dynaflow_train.schedule.plot import Panel, perfetto, timeline
from dynaflow_train.schedule.record import record
from dynaflow_train.schedule.simulate import simulate
from dynaflow_train.strategies import get
from dynaflow_train.strategy import Context
from tests.schedule.regions import AnySchedule, dags, llama_forward

REGION = llama_forward(1)
PLAN = record(get("dual_batch"), REGION, Context("forward", batch=4, tokens=4))
TIMES = {op.name: (4.0 if op.is_communication else 2.0) for op in REGION.ops}


def test_streams_run_in_order_after_their_waits_and_micro_batches_take_their_share():
    plan = Plan(
        "by hand",
        "model",
        "forward",
        (3, 1),
        (
            Launch(("layers.0.self_attn_norm",), (0, 1)),
            Launch(("layers.0.self_attn",), (0,)),
            Launch(("layers.0.self_attn.all_reduce",), (0,), "comm", None, (1,)),
            Launch(("layers.0.self_attn",), (1,)),
            Launch(("layers.0.self_attn.all_reduce",), (1,), "comm", None, (3,)),
            Launch(("layers.0.self_attn_add",), (0,), "compute", None, (2,)),
        ),
    )
    found = [(each.start_ms, each.end_ms) for each in simulate(plan, REGION, TIMES)]
    assert found == [(0, 2), (2, 3.5), (3.5, 6.5), (3.5, 4), (6.5, 7.5), (6.5, 8)]


def test_ops_without_a_time_are_estimated_from_flops_and_bytes():
    end = {PLAN.launches[i.launch].ops[0]: i.end_ms - i.start_ms for i in simulate(PLAN, REGION)}
    assert end["layers.0.mlp"] == pytest.approx(500e9 / 4e11 / 2)
    assert end["layers.0.mlp.all_reduce"] == pytest.approx(1e8 / 1.5e8 / 2)
    assert end["layers.0.mlp_add"] == pytest.approx(1e8 / 3e9 / 2)


@settings(max_examples=100, deadline=None)
@given(dags(), st.integers(0, 2**32), st.integers(1, 4))
def test_nothing_starts_before_what_it_reads_has_ended(region, seed, parts):
    plan = record(AnySchedule(seed, parts), region, Context("forward", batch=6, tokens=6))
    intervals = simulate(plan, region)
    for at, sources in enumerate(input_launches(plan, region)):
        assert all(intervals[source].end_ms <= intervals[at].start_ms for source in sources)


def test_exposed_is_where_no_other_stream_computes():
    plan = record(get("comm_overlap"), REGION, Context("forward", batch=4, tokens=4))
    spans = {2: (10.0, 20.0), 0: (0.0, 12.0), 1: (14.0, 15.0), 3: (15.0, 16.0), 4: (18.0, 30.0)}
    intervals = [Interval(at, *spans.get(at, (40.0, 41.0))) for at in range(len(plan.launches))]
    assert exposed_spans(plan, REGION, intervals)[2] == ((12.0, 14.0), (16.0, 18.0))


def panels():
    sequential = record(get("sequential"), REGION, Context("forward", batch=4, tokens=4))
    return [Panel(p, REGION, simulate(p, REGION, TIMES)) for p in (PLAN, sequential)]


def test_the_timeline_is_a_picture_of_every_panel(tmp_path):
    png = timeline(panels(), tmp_path / "timeline.png", title="one layer")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    svg = timeline(panels(), tmp_path / "timeline.svg", last_ms=10).read_text()
    assert len(re.findall("<!-- (?:compute|comm) -->", svg)) == 3
    for text in ("dual_batch, forward: ", "sequential, forward: ", "0% of communication hidden",
                 "exposed communication", "micro-batch 1"):  # fmt: skip
        assert f"<!-- {text}" in svg or text in svg
    assert timeline(panels()[0], tmp_path / "one.png").stat().st_size > 5000


def test_the_trace_holds_every_launch_with_its_stream_and_time(tmp_path):
    shown = panels()
    trace = json.loads(perfetto(shown, tmp_path / "trace.json").read_text())
    events = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(events) == sum(len(panel.plan.launches) for panel in shown)
    threads = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "thread_name"
    }
    assert set(threads.values()) == {"compute", "comm"}
    reduce = events[2]
    assert reduce["name"] == "layers.0.self_attn.all_reduce[0]"
    assert (reduce["ts"], reduce["dur"]) == (2000.0, 2000.0)
    assert threads[reduce["pid"], reduce["tid"]] == "comm"
    assert reduce["cat"] == "communication"
    assert reduce["args"]["waits"] == [1]
    assert sum(each["args"]["exposed_ms"] for each in events if each["pid"] == 1) == 8.0
