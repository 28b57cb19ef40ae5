"""A plan for each context: sizes that change, batches too small, modes that take no plan at all."""

from __future__ import annotations

import warnings

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.errors import SplitError
from tests.engine.harness import Cut, Oracle, batch, compiled, plain, quiet
from tests.engine.modules import LENGTH, WIDTH
from tests.engine.stepping import step, weighted
from tests.engine.zoo import ALL, SPLIT, Case, rows

SMALL = SPLIT["bias_free"]


def checked(model, case, size) -> None:
    Oracle(case, size, torch.float32).check(step(model, batch(case, size)), size)


def sizes(model, phase: str = "forward") -> list[tuple[int, ...]]:
    """Of the plans in use, oldest first."""
    return [used.plan.sizes for used in df.plans(model) if used.region.phase == phase]


class Counted(Cut):
    """Cuts in two, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__(2)
        object.__setattr__(self, "asked", [])

    def schedule(self, s):
        self.asked.append((s.context.phase, s.context.batch, s.context.tokens))
        super().schedule(s)


def test_each_batch_size_has_its_plan_and_is_asked_for_once():
    strategy = Counted()
    model = compiled(SMALL, strategy)
    for size in (4, 5, 7, 4, 5):  # two of them do not divide
        checked(model, SMALL, size)
    for phase in ("forward", "backward"):
        assert sizes(model, phase) == [(4, 3), (2, 2), (3, 2)]
    asked = [(phase, b, b * LENGTH) for b in (4, 5, 7) for phase in ("forward", "backward")]
    assert strategy.asked == asked


def test_each_sequence_length_has_its_plan():
    strategy, lengths = Counted(), (5, 3, 7, 5, 4)
    model = compiled(SMALL, strategy)
    for length in lengths:
        checked(model, Case(SMALL.make, rows(length, WIDTH)), 4)
    for phase in ("forward", "backward"):
        found = {tokens for each, _, tokens in strategy.asked if each == phase}
        assert found == {4 * length for length in lengths}
    number = len(strategy.asked)
    for length in lengths:
        checked(model, Case(SMALL.make, rows(length, WIDTH)), 4)
    assert len(strategy.asked) == number == 2 * len(sizes(model))
    assert set(sizes(model)) == set(sizes(model, "backward")) == {(2, 2)}


def test_the_plan_used_longest_ago_goes_where_there_are_too_many():
    strategy = Counted()
    model = compiled(SMALL, strategy, max_contexts=2)
    for size in (4, 6, 4, 8):  # 6 goes
        checked(model, SMALL, size)
    assert sizes(model) == sizes(model, "backward") == [(2, 2), (4, 4)]
    number = len(strategy.asked)
    checked(model, SMALL, 4)
    assert len(strategy.asked) == number
    checked(model, SMALL, 6)
    assert strategy.asked[number:] == [("forward", 6, 30), ("backward", 6, 30)]


def test_a_backward_may_come_after_its_plan_went():
    model, reference = compiled(SMALL, Cut(2), max_contexts=1), plain(SMALL)
    found = []
    for each in (model, reference):
        losses = [weighted(each(*batch(SMALL, size))) for size in (4, 6, 8)]
        for loss in losses:
            loss.backward()
        found.append([p.grad for p in each.parameters()])
    assert sizes(model) == [(4, 4)]
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_dynamic_asks_at_every_forward():
    class Dynamic(Counted):
        dynamic = True

        def schedule(self, s):
            phases = [phase for phase, *_ in self.asked]
            object.__setattr__(self, "parts", 1 + phases.count("forward"))
            super().schedule(s)

    strategy, found = Dynamic(), []
    model = compiled(SMALL, strategy)
    for _ in range(3):
        checked(model, SMALL, 4)
        found.append((sizes(model)[-1], sizes(model, "backward")[-1]))
    assert [phase for phase, *_ in strategy.asked].count("forward") == 3
    assert found == [((4,),) * 2, ((2, 2),) * 2, ((2, 1, 1),) * 2]


@pytest.mark.parametrize("name", ["block", "batch_norm"])
def test_evaluation_is_the_plain_forward_without_a_plan(name):
    case, strategy = ALL[name], Counted()
    model, reference = compiled(case, strategy), plain(case)
    inputs = batch(case, 4)
    for each in (model, reference):
        each(*inputs)  # one training forward: running statistics
    number, plans = len(strategy.asked), len(df.plans(model))
    for size in (4, 3, 1):
        inputs = batch(case, size)
        assert torch.equal(model.eval()(*inputs), reference.eval()(*inputs))
        if size > 1:  # BatchNorm wants more than one value in training
            with torch.no_grad():
                assert torch.equal(model.train()(*inputs), reference.train()(*inputs))
            with torch.inference_mode():
                assert torch.equal(model(*inputs), reference(*inputs))
    assert len(strategy.asked) == number
    assert len(df.plans(model)) == plans
    model.train()(*batch(case, 2))
    assert len(strategy.asked) == number + 1  # and training goes on


TOO_MANY = (
    r"cannot split a batch of 3 sample\(s\) into 4 micro-batches\. Set micro_batches to at mo"
)


def test_more_micro_batches_than_samples_is_an_error_if_strict():
    model = compiled(SMALL, "dual_batch", micro_batches=4, strict=True)
    with pytest.raises(SplitError, match=TOO_MANY):
        model(*batch(SMALL, 3))
    checked(model, SMALL, 4)
    assert sizes(model) == [(1, 1, 1, 1)]


def test_else_it_runs_whole_and_says_so_once():
    model = compiled(SMALL, "dual_batch", micro_batches=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            checked(model, SMALL, 3)
    (text,) = [str(each.message) for each in told if each.category is df.DynaFlowWarning]
    where, reason = text.split(": ", 1)
    assert where == "model forward runs sequentially"
    assert "cannot split a batch of 3 sample(s) into 4" in reason
    assert [(used.plan.sizes, used.plan.reason) for used in df.plans(model)] == [((3,), reason)] * 2


@pytest.mark.parametrize("first", [1, 4])
def test_a_batch_of_one(first):
    model = compiled(SMALL, "dual_batch")
    with quiet():
        for size in (first, 1, 4, 1):
            checked(model, SMALL, size)
    assert {(1,), (2, 2)} == set(sizes(model)) == set(sizes(model, "backward"))


def test_a_batch_of_one_that_is_strict():
    model = compiled(SMALL, "dual_batch", strict=True)
    with pytest.raises(SplitError, match=r"a batch of 1 sample\(s\) into 2 .*to at most 1"):
        model(*batch(SMALL, 1))
