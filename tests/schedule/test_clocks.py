from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from dynaflow_train.clocks import Clocks, place_waits
from dynaflow_train.ir import Launch


def launches(*rows: tuple[str, tuple[int, ...]]) -> tuple[Launch, ...]:
    return tuple(
        Launch((f"op{i}",), (0,), stream, None, waits) for i, (stream, waits) in enumerate(rows)
    )


PLAN = launches(("compute", ()), ("comm", (0,)), ("compute", ()), ("copy", (1,)), ("compute", (3,)))


def test_known_is_transitive_over_waits_and_the_own_stream():
    assert Clocks(PLAN).known == (
        {},
        {"compute": 0},
        {"compute": 0},
        {"comm": 1, "compute": 0},
        {"compute": 2, "copy": 3, "comm": 1},
    )


def test_first_known_is_the_first_launch_past_it_or_the_end_of_the_plan():
    clocks = Clocks(PLAN)
    assert clocks.first_known(1, "compute") == 4
    assert clocks.first_known(1, "copy") == 3
    assert clocks.first_known(0, "compute") == 2
    assert clocks.first_known(2, "comm") == len(PLAN)
    assert clocks.first_known(0, "nothing") == len(PLAN)


@st.composite
def dataflows(draw):
    number = draw(st.integers(1, 14))
    streams = [draw(st.sampled_from("abc")) for _ in range(number)]
    reads = [
        draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else set() for at in range(number)
    ]
    return streams, reads


def reachable(plan: tuple[Launch, ...]) -> list[set[int]]:
    """The launches before each one, by plain search: the clocks' oracle."""
    before: list[set[int]] = []
    for at, launch in enumerate(plan):
        own = [i for i in range(at) if plan[i].stream == launch.stream][-1:]
        found = {*own, *launch.waits}
        before.append(found.union(*(before[i] for i in found)))
    return before


@given(dataflows())
def test_waits_cover_every_read_and_none_can_be_left_out(dataflow):
    streams, reads = dataflow
    waits = place_waits(streams, reads)
    plan = launches(*zip(streams, waits, strict=True))
    assert all(reads[at] <= before for at, before in enumerate(reachable(plan)))
    for at, found in enumerate(waits):
        for wait in found:
            rows = list(zip(streams, waits, strict=True))
            rows[at] = (streams[at], tuple(each for each in found if each != wait))
            fewer = reachable(launches(*rows))
            assert not all(reads[i] <= before for i, before in enumerate(fewer))


@given(dataflows())
def test_clocks_equal_plain_search(dataflow):
    streams, reads = dataflow
    plan = launches(*zip(streams, place_waits(streams, reads), strict=True))
    clocks, before = Clocks(plan), reachable(plan)
    for at in range(len(plan)):
        for other in range(len(plan)):
            assert clocks.is_known(other, at) == (other in before[at])
        for stream in "abc":
            past = [i for i in range(len(plan)) if streams[i] == stream and at in before[i]]
            assert clocks.first_known(at, stream) == min(past, default=len(plan))


def test_two_thousand_launches_take_less_than_a_second():
    number = 2000
    streams = ["compute" if i % 3 else "comm" for i in range(number)]
    reads = [{i - 1, max(i - 7, 0)} if i else set() for i in range(number)]
    start = time.perf_counter()
    clocks = Clocks(launches(*zip(streams, place_waits(streams, reads), strict=True)))
    for at in range(number):
        clocks.first_known(at, "compute")
        clocks.first_known(at, "comm")
    assert time.perf_counter() - start < 1.0
