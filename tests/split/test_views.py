"""Where the batch goes when tensors are reshaped: checked with tensors that hold sample numbers."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaflow_train.ir import Axis
from dynaflow_train.split.axis import MixesSamples
from dynaflow_train.split.views import cut_axis, join_axes, reshape_axis

SYMBOL, BATCH = sympy.Symbol("s0", positive=True, integer=True), 7


def samples(axis: Axis, shape: list[int]) -> torch.Tensor:
    """A tensor in which every element is the number of the sample it belongs to."""
    rows = torch.arange(BATCH).repeat_interleave(int(axis.inner)).repeat(int(axis.outer))
    view = [1] * len(shape)
    view[axis.dim] = -1
    return rows.view(view).expand(shape)


def at_size(shape: list[object]) -> list[int]:
    """Symbolic sizes as numbers."""
    return [int(s.subs(SYMBOL, BATCH)) if isinstance(s, sympy.Expr) else s for s in shape]


def merged_somehow(draw, factors: list[object]) -> list[object]:
    """Neighbouring factors multiplied at random places."""
    shape, group = [], []
    for factor in factors:
        group.append(factor)
        if draw(st.booleans()):
            shape.append(math.prod(group))
            group = []
    return [*shape, math.prod(group)] if group else shape


@st.composite
def reshapes(draw):
    """(axis, sizes before, sizes after): two groupings of the same factors, one of them s0."""
    front = draw(st.lists(st.integers(1, 3), max_size=3))
    back = draw(st.lists(st.integers(1, 3), max_size=3))
    factors = [*front, SYMBOL, *back]
    before = merged_somehow(draw, factors)
    after = merged_somehow(draw, factors)
    dim = next(i for i, s in enumerate(before) if isinstance(s, sympy.Expr))
    outer = sympy.Integer(math.prod(front)) / math.prod([1, *before[:dim]])
    inner = sympy.Integer(math.prod(back)) / math.prod([1, *before[dim + 1 :]])
    return Axis(dim, int(outer), int(inner)), before, after


@settings(max_examples=150, deadline=None, derandomize=True)
@given(reshapes())
def test_the_axis_points_at_the_same_samples_after_a_reshape(case):
    axis, before, after = case
    moved = reshape_axis(axis, before, after, SYMBOL)
    wanted = samples(axis, at_size(before)).reshape(at_size(after))
    assert torch.equal(samples(moved, at_size(after)), wanted)
    assert reshape_axis(moved, after, before, SYMBOL) == axis


@pytest.mark.parametrize(
    ("axis", "before", "after"),
    [
        (
            Axis(0),
            [SYMBOL, 6],
            [SYMBOL * 2 // 2 * 3, 2],
        ),  # [3 * s0, 2]: a sample's rows stay together
        (Axis(0, 1, 4), [SYMBOL * 4, 6], [SYMBOL, 4, 6]),
        (Axis(0, 4, 1), [SYMBOL * 4, 6], [4, SYMBOL, 6]),
    ],
)
def test_flattened_tokens(axis, before, after):
    moved = reshape_axis(axis, before, after, SYMBOL)
    wanted = samples(axis, at_size(before)).reshape(at_size(after))
    assert torch.equal(samples(moved, at_size(after)), wanted)


@pytest.mark.parametrize(
    ("axis", "before", "after"),
    [
        (Axis(0), [SYMBOL, 6], [6, SYMBOL]),
        (Axis(1), [4, SYMBOL], [SYMBOL, 4]),
        (Axis(0, 1, 4), [SYMBOL * 4], [4, SYMBOL]),
        (Axis(0, 4, 1), [SYMBOL * 4], [SYMBOL, 4]),
        (Axis(0), [SYMBOL, 5], [sympy.floor(SYMBOL / 2), 2, 5]),
    ],
)
def test_a_reshape_that_takes_the_batch_apart_is_refused(axis, before, after):
    with pytest.raises(MixesSamples, match="takes the batch apart"):
        reshape_axis(axis, before, after, SYMBOL)


def test_whole_batches_may_be_cut_off_and_joined():
    assert cut_axis(Axis(0, 4, 3), 2 * 3 * SYMBOL, SYMBOL) == Axis(0, 2, 3)
    assert join_axes([Axis(1, 1, 2), Axis(1, 3, 2)]) == Axis(1, 4, 2)
    with pytest.raises(MixesSamples, match="some samples out of the batch"):
        cut_axis(Axis(0), SYMBOL - 1, SYMBOL)
    with pytest.raises(MixesSamples, match="ordered differently"):
        join_axes([Axis(0, 1, 2), Axis(0, 2, 1)])
