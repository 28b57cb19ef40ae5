"""run_ranks and try_ranks: values come back, failures name their rank, nothing hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.conftest import missing_devices
from tests.ranks import RanksFailedError, run_ranks, try_ranks

pytestmark = pytest.mark.dist


def summed(rank: int, factor: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(factor * (rank + 1))])
    dist.all_reduce(value)
    return dist.get_world_size(), value


def fails_on_one(rank: int) -> None:
    if rank == 1:
        message = "rank one does not like it"
        raise ValueError(message)
    dist.all_reduce(torch.ones(1))


def fails_everywhere(rank: int) -> None:
    message = f"this is rank {rank}"
    raise ValueError(message)


def killed_on_one(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "saw the other rank go"
    return "noticed nothing"


def sleeps_on_one(rank: int) -> str:
    if rank == 1:
        time.sleep(600)
    return "done"


def test_values_come_back_by_rank():
    results = run_ranks(summed, 3, 10)
    assert [world for world, _ in results] == [3, 3, 3]
    assert [value.item() for _, value in results] == [60.0, 60.0, 60.0]


def test_one_failing_rank_fails_the_run_with_its_traceback():
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fails_on_one, 2)
    text = str(caught.value)
    assert "--- rank 1 ---" in text
    assert "ValueError: rank one does not like it" in text
    assert "in fails_on_one" in text


def test_every_failing_rank_is_reported():
    with pytest.raises(RanksFailedError, match="2 of 2 ranks failed") as caught:
        run_ranks(fails_everywhere, 2)
    assert all(f"ValueError: this is rank {rank}" in str(caught.value) for rank in range(2))


def test_killed_rank_is_an_outcome_and_the_others_report():
    alive, dead = try_ranks(killed_on_one, 2)
    assert alive.value == "saw the other rank go"
    assert alive.error is None
    assert dead.error == "rank 1 died without a report, exit code -9"
    assert dead.exitcode == -signal.SIGKILL


def test_hanging_rank_is_killed_at_the_time_limit():
    run_ranks(summed, 2, 1)  # the fork server's start is not part of the limit
    start = time.monotonic()
    done, hung = try_ranks(sleeps_on_one, 2, timeout_s=6)
    assert done.value == "done"
    assert hung.error is not None
    assert hung.error.startswith("rank 1 was still running after")
    assert 6 <= time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("marks", "found", "reason"),
    [
        ([pytest.mark.gpu], 0, "needs 1 CUDA device, found 0"),
        ([pytest.mark.multigpu(2)], 0, "needs 2 CUDA devices, found 0"),
        ([pytest.mark.multigpu(4)], 2, "needs 4 CUDA devices, found 2"),
        ([pytest.mark.multigpu(2)], 2, None),
        ([pytest.mark.dist], 0, None),
    ],
)
def test_skip_reason_carries_numbers(request, marks, found, reason):
    item = pytest.Function.from_parent(request.node.parent, name="fake", callobj=summed)
    for mark in marks:
        item.add_marker(mark)
    assert missing_devices(item, found) == reason
