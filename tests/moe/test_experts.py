"""Experts over ranks: the unsharded step's results under every routing and every schedule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import dynaflow_train as df
from dynaflow_train import strategies
from dynaflow_train.errors import ScheduleError
from dynaflow_train.strategy import Strategy
from tests.engine.harness import AnySchedule, Cut, Switch, quiet
from tests.moe.block import inputs, make, ours, truth, worst
from tests.ranks import run_ranks

ROUTINGS: dict[str, tuple[int, ...]] = {
    "as it comes": (),
    "all tokens to one expert": (5,),
    "nothing for the first rank": (7, 6),
    "two experts, one of each rank": (0, 4),
}
SIZES = {(8, 2): 5, (2, 1): 2, (16, 8): 2, (6, 3): 1, (128, 4): 3}  # experts, k: samples of a rank
SEEDS = 12


class Merged(Strategy):
    """Asks for what rows cannot do."""

    def schedule(self, s):
        s.split(None if s.context.forward_sizes else 2)
        while ready := s.get_ready_ops():
            op = next((each for each in ready if each.is_mergeable), ready[0])
            s.execute([each for each in ready if each.op == op.op])


class Watched(Strategy):
    """dual_batch, and what it issues in each phase."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", {})

    def schedule(self, s):
        strategies.get("dual_batch").schedule(s)
        assert s.sizes == (3, 2)
        self.seen[s.context.phase] = [
            (x.ops[0], x.micro_batches[0], x.stream or "compute") for x in s.launches
        ]


def compiled(experts: int, k: int) -> tuple[Any, Switch]:
    switch = Switch(*strategies.get("dual_batch").rules)
    return df.compile(make(experts, k).shard(), switch, executor="eager"), switch


def schedules(size: int) -> list[Any]:
    found = [strategies.get("sequential"), strategies.get("comm_overlap")]
    if size > 1:
        found += [strategies.get("dual_batch", merge_wgrads=m) for m in (False, True)]
        found.append(Cut([1, size - 1]))
    return [*found, Cut([1, 1, size - 2])] if size > 2 else found


def steps(model: Any, switch: Switch, rank: int, given: Any, plans: list[Any]) -> list[Any]:
    k, experts = model.k, model.experts
    exact, plain = (truth(experts, k, given, t)[rank] for t in (torch.float64, torch.float32))
    report = []
    for strategy in plans:
        switch.use(strategy)
        with quiet():
            excess, where = worst(ours(model, given, rank), plain, exact)
        report.append((excess, f"{experts} experts, k={k}, {strategy}: {where}"))
    return report


def on_rank(rank: int) -> dict[str, Any]:
    report: dict[str, Any] = {"errors": []}
    for (experts, k), size in SIZES.items():
        model, switch = compiled(experts, k)
        for name, favoured in (ROUTINGS if experts == 8 else {"as it comes": ()}).items():
            given = inputs(size, experts, seed=len(report["errors"]), favoured=favoured)
            found = steps(model, switch, rank, given, schedules(size))
            report["errors"] += [(excess, f"{name}, {where}") for excess, where in found]
        if experts == 8:
            report |= special(model, switch, rank)
    return report


def special(model: Any, switch: Switch, rank: int) -> dict[str, Any]:
    """Random legal schedules, the shape of a dual-batch plan, and a refusal."""
    given = inputs(5, 8, seed=99)
    lanes = [AnySchedule(seed) for seed in range(SEEDS)]
    found = {"random": steps(model, switch, rank, given, lanes)}
    watched = Watched()
    switch.use(watched)
    ours(model, given, rank)
    found["plan"] = watched.seen
    switch.use(Merged())
    with pytest.raises(ScheduleError) as refused:
        ours(model, given, rank)
    found["refused"] = str(refused.value)
    return found


def training(rank: int) -> tuple[list[float], list[float], int]:
    """Losses of a sharded, split run and of the whole model; how often a first choice changed."""
    whole, routes = make(8, 2, torch.float64), set()
    sharded = make(8, 2, torch.float64).shard()
    df.compile(sharded, "dual_batch", executor="eager")
    losses: tuple[list[float], list[float]] = ([], [])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.002) for m in (sharded, whole)]
    for step in range(20):
        x, push = (t.double() for t in inputs(2, 8, seed=step % 5))
        target = torch.roll(x, 1, -1)
        for place, (model, optimizer) in enumerate(zip((sharded, whole), optimizers, strict=True)):
            optimizer.zero_grad()
            own = slice(2 * rank, 2 * rank + 2) if model is sharded else slice(None)
            loss = (model(x[own], push[own])[0] - target[own]).square().sum()
            loss.backward()
            if model is sharded:
                torch.distributed.all_reduce(loss.detach_())
                for name, parameter in model.named_parameters():
                    if name not in ("first", "second"):
                        torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            losses[place].append(loss.item())
        with torch.no_grad():
            chosen = (whole.router(torch.tanh(whole.mix(x))) + push).argmax(-1)
        routes.add((step % 5, tuple(chosen.flatten().tolist())))
    return *losses, len(routes)


def both(rank: int) -> tuple[Any, Any]:
    return on_rank(rank), training(rank)


@pytest.fixture(scope="module")
def reports():
    return run_ranks(both, 2)


@pytest.mark.dist
def test_every_routing_and_schedule_gives_the_unsharded_step(reports):
    for report, _ in reports:
        assert len(report["errors"]) > 30
        for excess, where in (*report["errors"], *report["random"]):
            assert excess <= 1, where
        assert len(report["random"]) == SEEDS


FORWARD = """
    a mix | a counts, a to host | b mix | a dispatch, b counts, b to host | a experts
    | b dispatch, a combine | b experts | b combine | a rest | b rest"""
BACKWARD = """
    a combine's | a to experts | b combine's | b to experts | a experts | a back | a wgrad
    | b experts | b back | b wgrad | a mix | a router.wgrad | a mix.wgrad | b mix"""


def named(plan: list[tuple[str, int, str]], names: dict[str, str]) -> list[str]:
    """Launches by the names that they have in the paper; `a` is the micro-batch that is first."""
    first = plan[0][1] if names is FORWARDS else plan[1][1]
    return [f"{'a' if part == first else 'b'} {names[op]}" for op, part, _ in plan if op in names]


FORWARDS = {
    "mix": "mix",
    "forward.all_to_all": "counts",
    "forward.copy_to_host": "to host",
    "forward.all_to_all.2": "dispatch",
    "forward.rows": "experts",
    "forward.all_to_all.3": "combine",
    "forward": "rest",
}
BACKWARDS = {
    "backward": "combine's",
    "backward.all_to_all": "to experts",
    "backward.rows": "experts",
    "backward.all_to_all.2": "back",
    "rest.wgrad.rows": "wgrad",
    "backward.2": "mix",
    "router.wgrad": "router.wgrad",
    "mix.wgrad": "mix.wgrad",
}


@pytest.mark.dist
def test_attention_of_one_micro_batch_runs_beside_the_dispatch_of_the_other(reports):
    seen = reports[0][0]["plan"]
    assert seen == reports[1][0]["plan"]
    for phase, names, wanted in (("forward", FORWARDS, FORWARD), ("backward", BACKWARDS, BACKWARD)):
        order = re.split(r"\s*[|,]\s*", wanted.strip())
        assert named(seen[phase], names)[: len(order)] == order
        assert {s for op, _, s in seen[phase] if "all_to_all" in op or "copy" in op} == {"comm"}


@pytest.mark.dist
def test_rows_are_never_merged(reports):
    assert "has rows by expert: run it for each of [0, 1] alone" in reports[0][0]["refused"]


@pytest.mark.dist
def test_losses_of_20_steps_lie_on_top_of_each_other(reports):
    for _, (found, wanted, routes) in reports:
        assert found == pytest.approx(wanted, rel=1e-9)
        assert wanted[-1] < 0.9 * wanted[0]
        assert routes > 5  # 5 batches: the routing changes while it trains
