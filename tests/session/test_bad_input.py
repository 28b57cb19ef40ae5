"""What is wrong is said on every rank, with what was asked and found, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.errors import DynaFlowError
from tests.engine.harness import batch, compiled
from tests.engine.parallel import PARALLEL
from tests.engine.stepping import step
from tests.engine.zoo import ALL
from tests.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.dist
LIMIT_S = 4.0  # how long ranks wait for each other's plans here


class NoSuchModule(df.Strategy):
    """A rule that fits nothing."""

    rules = (df.SplitModule("*.norm7"),)

    def schedule(self, s):
        s.sequential()


def attempt(rank, name, size, strategy, options, repeat=1):
    """The error of a step on this rank as (class, message), its warnings, its seconds."""
    case = PARALLEL.get(name) or ALL[name]
    size = size[rank] if isinstance(size, tuple) else size
    strategy = strategy[rank] if isinstance(strategy, tuple) else strategy
    start, said = time.monotonic(), ("", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", df.DynaFlowWarning)
        try:
            model = compiled(case, strategy, agree_timeout_s=LIMIT_S, **options)
            for _ in range(repeat):
                step(model, batch(case, size))
        except Exception as error:
            cause = error if isinstance(error, DynaFlowError) else error.__cause__ or error
            said = (type(cause).__name__, str(cause))
    told = [str(w.message) for w in caught if issubclass(w.category, df.DynaFlowWarning)]
    return said, told, time.monotonic() - start


CASES = {
    "unknown strategy": (
        ("fg", 4, "dual_bach", {}),
        "RecipeError",
        "no strategy 'dual_bach'. Did you mean 'dual_batch'?",
    ),
    "unknown key": (
        ("fg", 4, "dual_batch", {"micro_batch": 2}),
        "RecipeError",
        "Did you mean 'micro_batches'?",
    ),
    "rule without a match": (
        ("fg", 4, NoSuchModule(), {}),
        "RuleError",
        r"matches nothing among \d+ module names.*Near: .*norm1",
    ),
    "more micro-batches than samples": (
        ("fg", 2, "dual_batch", {"micro_batches": 3, "strict": True}),
        "SplitError",
        r"cannot split a batch of 2 sample\(s\) into 3 micro-batches. Set micro_batches to",
    ),
    "an op that mixes samples": (
        ("batch_norm", 4, "dual_batch", {"strict": True}),
        "SplitError",
        r"strict: .* would run merged for all 2 micro-batches: .*over the batch \(.*\.py:\d+\)",
    ),
    "other batch sizes": (
        ("fg", (4, 6), "dual_batch", {}),
        "PlanMismatchError",
        "rank 1 of 2 made another plan.*rank 0: .*2 2.*rank 1: .*3 3",
    ),
    "other recipes": (
        ("fg", 4, ("dual_batch", "comm_overlap"), {}),
        "PlanMismatchError",
        "rank 1 of 2 made another plan.*rank 0: strategy dual_batch.*rank 1: strategy comm_overlap",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_every_rank_says_what_is_wrong(what):
    arguments, kind, message = CASES[what]
    for said, _, seconds in run_ranks(attempt, 2, *arguments):
        assert said[0] == kind, said
        assert re.search(message, said[1], re.DOTALL), said[1]
        assert seconds < 60


def test_without_strict_it_runs_uncut_and_says_so_once():
    for said, told, _ in run_ranks(attempt, 2, "fg", 2, "dual_batch", {"micro_batches": 3}, 3):
        assert said == ("", "")
        (warning,) = told
        assert "cannot split a batch of 2" in warning


def killed(rank):
    """Rank 1 dies before its first step; what rank 0 says, and after how long."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(rank, "fg", 4, "dual_batch", {})


def test_a_killed_rank_is_an_error_within_the_limit():
    first, second = try_ranks(killed, 2)
    said, _, seconds = first.value
    assert second.exitcode == -signal.SIGKILL
    assert said[0] == "PlanMismatchError"
    assert "rank 0 waited 4 s for the plan" in said[1]
    assert "rank 1 of 2 did not answer" in said[1]
    assert seconds < 60


def test_no_process_group_is_needed_without_collectives():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    df.compile(model, "dual_batch", executor="eager")
    x = torch.randn(4, 4, requires_grad=True)
    model(x).sum().backward()
    assert [p.plan.sizes for p in df.plans(model)] == [(2, 2), (2, 2)]
