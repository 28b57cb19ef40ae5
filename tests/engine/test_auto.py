"""Strategy auto: every step is exact while it tries, ranks agree, choices are remembered."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.api import sessions
from dynaflow_train.choices import Chooser
from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies import get
from tests.engine.harness import Oracle, batch, compiled
from tests.engine.parallel import PARALLEL
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT
from tests.ranks import run_ranks

STEPS = 5 * 2 + 1  # one warmup and one sample of each candidate, then the choice
NAMES = tuple(get("auto").alternatives)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_CACHE", str(tmp_path / "cache"))


def train(rank, region, folder):
    """Trains three times: what `auto` chose, and from what. Rank 1 forgets before the third."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAFLOW_CACHE", f"{folder}/{rank}")
        case = PARALLEL["fg"]
        oracle, inputs = Oracle(case, 4, torch.float32), batch(case, 4)
        for run in range(3 if region == "model" else 1):
            for file in Path(folder, "1").glob("*") if run == 2 and rank == 1 else ():
                file.unlink()
            model = compiled(case, "auto", region=region, warmups=1, samples=1)
            for number in range(STEPS):
                oracle.check(step(model, inputs), f"run {run}, step {number}")
            (choice,) = df.explain(model).choices
            assert {p.plan.strategy for p in df.plans(model)} == {choice.chosen.split()[0]}
            found.append(choice)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("region", ["model", "layer"])
def test_two_ranks_train_exactly_and_keep_one_candidate(region, tmp_path):
    chosen, also = run_ranks(train, 2, region, str(tmp_path))
    assert chosen == also
    first, *later = chosen
    assert first.names == NAMES
    assert len(first.times) == len(NAMES)
    assert first.chosen == NAMES[first.times.index(min(first.times))]
    for remembered, again in [later] if later else []:
        assert remembered.times == ()
        assert remembered.chosen == first.chosen
        assert len(again.times) == len(NAMES), "a rank that forgot makes all measure again"


def test_a_delayed_candidate_is_not_kept():
    case = SPLIT["block"]
    oracle, inputs = Oracle(case, 4, torch.float32), batch(case, 4)
    model = compiled(case, "auto", candidates=("sequential", "dual_batch"))
    for _ in range(2):
        step(model, inputs)
    (capture,) = sessions(model)[0].captures
    slow = capture.forwards[1]
    (entry,) = slow.entries.values()
    call = entry.call

    def late(arguments):
        time.sleep(0.05)
        return call(arguments)

    entry.call = late
    for _ in range(10):
        oracle.check(step(model, inputs))
    (choice,) = df.explain(model).choices
    assert choice.chosen == "sequential"
    assert choice.times[1] > choice.times[0] + 25
    assert not slow.entries, "what was not kept lets its memory go"
    assert "auto keeps sequential" in str(df.explain(model))


def test_each_size_is_a_context_and_pending_forwards_keep_their_candidate():
    case = SPLIT["block"]
    model = compiled(case, "auto", candidates=("sequential", "dual_batch"), warmups=1, samples=1)
    oracles = {n: Oracle(case, n, torch.float32) for n in (2, 4)}
    for _ in range(6):
        for size, oracle in oracles.items():
            oracle.check(step(model, batch(case, size)), size)
    choices = df.explain(model).choices
    assert [choice.sizes for choice in choices] == [(2,), (4,)]
    # As many forwards at once as there are candidates, then the backwards in the other order.
    model = compiled(case, "auto", candidates=("sequential", "dual_batch"))
    inputs = [x.clone().requires_grad_() for _ in range(4) for x in batch(case, 4)[:1]]
    outputs = [model(x) for x in inputs]
    for output in reversed(outputs):
        output.sum().backward()
    for x in inputs[1:]:
        torch.testing.assert_close(x.grad, inputs[0].grad)


def test_forwards_without_a_backward_end_in_a_choice():
    case = SPLIT["block"]
    model = compiled(case, "auto", candidates=("sequential", "dual_batch"), warmups=1, samples=1)
    for _ in range(4 * 2 * 2 + 1):
        model(*batch(case, 4))
    assert len(df.explain(model).choices) == 1


def chooser(identity, *others, remember=True):
    """One that hears what other ranks say, beside its own."""
    return Chooser("r", ("a", "b"), (identity,), lambda text: [text, *others], remember)


def test_the_slowest_rank_counts(tmp_path):
    assert chooser("id", "[9.0, 3.0]").settle((4,), [1.0, 2.0]) == (1, [9.0, 3.0])
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text()) == {"chosen": "b", "ms": {"a": 9.0, "b": 3.0}}
    assert chooser("id", "b").recall((4,)) == 1
    assert chooser("id", "a").recall((4,)) is None, "ranks remember different choices"
    assert chooser("id", "").recall((4,)) is None, "a rank remembers nothing"
    assert chooser("id").recall((5,)) is None, "other sizes"
    assert chooser("new").recall((4,)) is None, "another graph or machine"
    assert chooser("id", remember=False).recall((4,)) is None
    file.write_text("{ half")
    assert chooser("id").recall((4,)) is None


def test_one_candidate_is_pinned_and_measures_nothing():
    case = SPLIT["block"]
    model = compiled(case, "auto", candidates=("dual_batch micro_batches=4",))
    step(model, batch(case, 4))
    assert {p.plan.sizes for p in df.plans(model)} == {(1, 1, 1, 1)}


def test_sequential_is_always_tried():
    strategy = get("auto", candidates=("dual_batch", "nanoflow"), exclude=("nanoflow",))
    assert tuple(strategy.alternatives) == ("sequential", "dual_batch")
    assert get("auto", exclude=("dual_batch",)).most_micro_batches == 2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"candidates": ("dual_bach",)}, "no strategy 'dual_bach'. Did you mean 'dual_batch'"),
        ({"candidates": ("auto",)}, "no strategy 'auto'"),
        ({"candidates": ("dual_batch 4",)}, "'4' is no parameter=value"),
        ({"candidates": ("dual_batch micro_batches=two",)}, "takes micro_batches as int"),
        ({"exclude": ("flux",)}, "auto excludes 'flux', but tries only sequential"),
        ({"samples": 0}, "samples of at least 1; found 5"),
        ({"candidates": ("sequential",), "exclude": ("sequential",)}, r"found 0 candidate\(s\)"),
    ],
)
def test_wrong_parameters_are_refused(parameters, message):
    with pytest.raises(RecipeError, match=message):
        compiled(SPLIT["block"], "auto", **parameters)


def test_what_was_chosen_holds_for_one_way_of_transfer():
    case, found = SPLIT["block"], []
    oracle, inputs = Oracle(case, 4, torch.float32), batch(case, 4)
    for transfer in ("group", "group", "copy_engine"):
        model = compiled(case, "auto", warmups=1, samples=1, transfer=transfer)
        for number in range(STEPS):
            oracle.check(step(model, inputs), f"{transfer}, step {number}")
        (choice,) = df.explain(model).choices
        found.append(len(choice.times))
    assert found == [len(NAMES), 0, len(NAMES)]
