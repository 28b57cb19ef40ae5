"""Streams with NCCL options: a group of their own, made once, and what is said where there is none.

gloo has no options, but a group of gloo can be made again like one of NCCL: `Anyway` does it.
"""

from __future__ import annotations

import inspect
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import dynaflow_train as df
from dynaflow_train import api
from dynaflow_train.config import StreamOptions
from dynaflow_train.errors import PlanMismatchError
from dynaflow_train.execute import groups
from dynaflow_train.execute.groups import Groups
from dynaflow_train.execute.program import Communicate
from dynaflow_train.ir import Launch, Op, Plan, Region
from tests.engine.harness import AnySchedule, Oracle, batch, compiled, quiet, step
from tests.engine.parallel import PARALLEL
from tests.ranks import run_ranks

LIMITED = {"comm": {"max_ctas": 4, "priority": "high"}}
FG = PARALLEL["fg"]


class Anyway(Groups):
    """Also of gloo."""

    def why_not(self, group, device):
        return ""


def anyway(model) -> Groups:
    """The groups of a model that has not run yet, made whatever the backend is."""
    session = api.sessions(model)[0]
    session.groups = Anyway(session.groups.options, session._heard, session.warn)
    return session.groups


def check(model, sizes: tuple[int, ...] = (4,), steps: int = 4) -> list[str]:
    """Exact steps; what was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", df.DynaFlowWarning)
        for size in sizes * steps:
            Oracle(FG, size, torch.float32).check(step(model, batch(FG, size)), size)
    return [str(each.message) for each in told if each.category is df.DynaFlowWarning]


def used_groups(model) -> dict[str, set[dist.ProcessGroup]]:
    """The process groups that the collectives of each lane are bound to."""
    found: dict[str, set[dist.ProcessGroup]] = {}
    for capture in api.sessions(model)[0].captures:
        for runner in capture.runners:
            for entry in runner.entries.values():
                for block in entry.program.blocks:
                    for each in block.steps:
                        if isinstance(each, Communicate):
                            bound = inspect.getclosurevars(each.function).nonlocals["group"]
                            found.setdefault(block.lane, set()).add(bound)
    return found


def on_gloo(rank: int) -> tuple[list[str], str, int]:
    model = compiled(FG, "dual_batch", nccl=LIMITED)
    told = check(model, (4, 6))
    (bound,) = used_groups(model).values()
    assert bound == {dist.group.WORLD}
    return told, str(df.explain(model)), len(dist.distributed_c10d._world.pg_names)


@pytest.mark.dist
def test_on_gloo_it_is_told_once_and_changes_nothing():
    text = "nccl, stream 'comm': its options have no effect: the group is gloo, not nccl."
    for told, explained, number in run_ranks(on_gloo, 2):
        assert told == [text]
        assert explained.splitlines()[-1] == text
        assert number == 1


def of_its_own(rank: int, engine: str) -> tuple[int, str]:
    model = compiled(FG, "dual_batch", nccl=LIMITED, engine=engine)
    made = anyway(model).made
    assert check(model, (4, 6)) == []
    ((key, group),) = made.items()
    assert key == ("comm", dist.group.WORLD.group_name)
    assert used_groups(model) == {"comm": {group}}, "both phases, both sizes"
    assert group is not dist.group.WORLD
    assert dist.get_process_group_ranks(group) == [0, 1]
    x = torch.full((3,), 1.0 + rank)
    dist.all_reduce(x, group=group)
    return int(x.sum()), str(df.explain(model)).splitlines()[-1]


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["fast", "interpreter"])
def test_a_stream_has_one_group_of_its_own_and_its_collectives_use_it(engine):
    text = "nccl, stream 'comm': a communicator of its own, max_ctas 4, priority high"
    assert run_ranks(of_its_own, 2, engine) == [(9, text)] * 2


def any_schedules(rank: int) -> None:
    for seed in range(4):  # collectives on all three lanes, of which two have a group
        model = compiled(FG, AnySchedule(seed), nccl={**LIMITED, "copy": {"max_ctas": 4}})
        made = anyway(model).made
        with quiet():
            check(model, steps=2)
        bound = used_groups(model)
        assert bound.pop("compute", {dist.group.WORLD}) == {dist.group.WORLD}
        assert bound == {stream: {group} for (stream, _), group in made.items()}
        assert len(set(made.values())) == len(made), "equal options, but a group each"


@pytest.mark.dist
def test_each_stream_has_its_own_and_others_keep_theirs():
    run_ranks(any_schedules, 2)


def other_options(rank: int) -> str:
    model = compiled(FG, "comm_overlap", nccl={"comm": {"max_ctas": 4 + rank}})
    anyway(model)
    with pytest.raises(PlanMismatchError) as caught:
        model(*batch(FG, 4))
    return str(caught.value)


@pytest.mark.dist
def test_other_options_on_another_rank_are_an_error_on_both():
    for text in run_ranks(other_options, 2):
        assert "have other nccl options" in text
        assert "rank 0: comm: max_ctas 4; as group" in text
        assert "rank 1: comm: max_ctas 5; as group" in text


def alone(rank: int) -> str:
    """Rank 1 has no options, and its recipe's time limit is short."""
    options = {"nccl": LIMITED} if rank == 0 else {}
    model = compiled(FG, "comm_overlap", agree_timeout_s=2, **options)
    made = anyway(model)
    if rank == 1:
        time.sleep(6)
        return ""
    region = Region("layer", "forward", (reduction("all_reduce"),), {}, (), ())
    with pytest.raises(PlanMismatchError) as caught:
        made.of(plan(Launch(("sum",), (0,), "comm")), region, torch.device("cpu"))
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_without_the_options_ends_in_an_error_not_in_a_hang():
    first, _ = run_ranks(alone, 2)
    assert "rank 0 waited 2 s" in first
    assert "rank 1 of 2 did not answer" in first


def misnamed(rank: int) -> tuple[list[str], str]:
    model = compiled(FG, "comm_overlap", nccl={"com": {"max_ctas": 4}})
    return check(model), str(df.explain(model)).splitlines()[-1]


@pytest.mark.dist
def test_a_stream_without_launches_is_told_once_with_those_there_are():
    text = (
        "nccl has options for stream 'com', but no launch is on it. Did you mean 'comm'? There are "
        "compute, comm."
    )
    for told, explained in run_ranks(misnamed, 2):
        assert told == [text]
        assert explained == text


def split_of_all(rank: int) -> list[str]:
    """With a bound device torch splits the communicator of all ranks."""
    part, whole = [dist.new_group([r]) for r in range(2)][rank], dist.group.WORLD
    groups.NAME, made, cpu = "gloo", Groups({}, lambda *_: [], print), torch.device("cpu")
    before = [made.why_not(part, cpu), made.why_not(whole, cpu)]
    whole.bound_device_id = torch.device("cuda", 0)
    found = [*before, made.why_not(whole, cpu), made.why_not(part, cpu)]
    whole.bound_device_id = None
    return found


@pytest.mark.dist
def test_a_group_of_some_ranks_is_not_split_off_all():
    for *fine, refused in run_ranks(split_of_all, 2):
        assert fine == ["", "", ""]
        assert "init_process_group was given a device_id" in refused


def reduction(kind: str) -> Op:
    return Op("sum", "communication", ("x",), ("y",), collective=kind, group="0")


def plan(launch: Launch) -> Plan:
    return Plan("mine", "layer", "forward", (4,), (launch,))


@pytest.mark.parametrize(
    ("kind", "kernel", "named"),
    [("broadcast", None, "broadcast"), ("all_reduce", "fused_sum", "fused_sum")],
)
def test_what_does_not_go_through_the_group_is_told(kind, kernel, named):
    told: list[str] = []
    made = Groups({"comm": StreamOptions(4)}, lambda *_: [], told.append)
    region = Region("layer", "forward", (reduction(kind),), {}, (), ())
    launch = Launch(("sum",), (0,), "comm", kernel)
    assert made.of(plan(launch), region, torch.device("cpu")) == {}
    assert told == [
        f"nccl, stream 'comm': its options have no effect: {named} does not go through its process "
        "group."
    ]
    assert list(made.says) == told


def test_priorities_are_of_streams_that_have_one():
    options = {
        "comm": StreamOptions(priority="normal"),
        "memory": StreamOptions(priority="high"),
        "copy": StreamOptions(4),
    }
    assert Groups(options, lambda *_: [], print).priorities == {"comm": 0, "memory": -1}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_is_told_what_was_asked():
    found = groups._for_nccl(StreamOptions(8, 2, "high"), None)
    assert (found.config.max_ctas, found.config.min_ctas) == (8, 2)
    assert found.is_high_priority_stream
    assert not groups._for_nccl(StreamOptions(8), None).is_high_priority_stream
