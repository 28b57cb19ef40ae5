"""Experts over ranks: the unsharded step's results under every routing and every schedule."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dynaflow_train as df
from dynaflow_train import strategies
from tests.engine.harness import AnySchedule, Cut, Switch, quiet
from tests.moe.block import inputs, make, ours, truth, worst
from tests.ranks import run_ranks

ROUTINGS: dict[str, tuple[int, ...]] = {
    "as it comes": (),
    "all tokens to one expert": (5,),
    "nothing for the first rank": (7, 6),
    "two experts, one of each rank": (0, 4),
}
SIZES = {(8, 2): 5, (2, 1): 2, (6, 3): 2, (128, 8): 3}  # experts, k -> samples of a rank


def schedules(size: int) -> list[Any]:
    uneven = [(1, size - 1)] if size > 1 else []
    uneven += [(1, 1, size - 2)] if size > 2 else []
    found = [strategies.get(name) for name in ("sequential", "comm_overlap", "dual_batch")]
    return [*found, *(Cut(list(sizes)) for sizes in uneven)]


def every_routing(rank: int) -> list[Any]:
    report = []
    for (experts, k), size in SIZES.items():
        model, switch = make(experts, k).shard(), Switch(*strategies.get("dual_batch").rules)
        df.compile(model, switch, executor="eager")
        routings = ROUTINGS if experts == 8 else {"as it comes": ()}
        for name, favoured in routings.items():
            given = inputs(size, experts, seed=len(report), favoured=favoured)
            exact, plain = (
                truth(experts, k, given, dtype)[rank] for dtype in (torch.float64, torch.float32)
            )
            for strategy in schedules(size):
                switch.use(strategy)
                with quiet():
                    excess, where = worst(ours(model, given, rank), plain, exact)
                report.append((excess, f"{experts} experts, {name}, {strategy}: {where}"))
    return report


@pytest.mark.dist
def test_every_routing_gives_the_unsharded_step():
    start = time.time()
    for report in run_ranks(every_routing, 2):
        excess, where = max(report)
        assert len(report) > 20
        assert excess <= 1, where
    print("TIME", time.time() - start)
