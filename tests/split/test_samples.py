"""Chains of operators: where it was cut, samples do not see each other; the unknown is merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynaflow_train.split import analyse
from tests.split.cases import ALONG, ALWAYS, FLAT, batched
from tests.split.tracing import BATCH, check, check_others, check_parts, trace

CHAIN = {**ALONG, **ALWAYS, **FLAT}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(CHAIN)), st.integers(-3, 2)), min_size=2, max_size=5
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(at=st.integers(0, 2), steps=STEPS, cuts=st.sampled_from([(1, 5), (2, 3, 1), (3, 3)]))
def test_whatever_follows_whatever(at, steps, cuts):
    def function(x: Tensor) -> list[Tensor]:
        found = []
        for name, dim in steps:
            if isinstance(x, list) or x.dim() != 3 or x.dtype != torch.float32:
                break
            x = CHAIN[name](x, dim)
            found.append(x)
        return found

    try:
        traced = trace(function, [batched(at)], [at])
    except (RuntimeError, IndexError, ValueError) as refused:
        beyond = ("out of range", "out of bounds", "size", "shape", "fixes the batch", "expanded")
        if any(word in str(refused) for word in beyond):
            return  # a step went beyond what the one before left
        raise
    check(traced, cuts)


def test_an_unknown_operator_counts_as_merged_and_is_named():
    library = torch.library.Library("dynaflow_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("dynaflow_tests::twice", lambda x: torch.empty_like(x), lib=library)
    traced = trace(lambda x: torch.ops.dynaflow_tests.twice(x) + 1, [batched(0)], [0])
    (reason,) = traced.analysis.reasons.values()
    assert reason == "dynaflow_tests.twice.default: no rule says that it keeps samples apart"
    assert sorted(traced.modes()) == ["merged", "split"]  # behind it the batch is found again
    library._destroy()


def test_only_zeros_made_in_the_graph_count_as_zeros():
    traced = trace(
        lambda table, i, v: table.index_put((i,), v, accumulate=True),
        [torch.ones(5, 4), torch.arange(BATCH) % 3, torch.ones(BATCH, 4)],
        [None, 0, 0],
    )
    saved = next(iter(traced.graph.nodes))
    for name in ("zeros", "full_default", "zeros.default"):
        saved.target = saved.name = name
        found = analyse(traced.graph, traced.analysis.infos, traced.symbol)
        (reason,) = found.reasons.values()
        assert reason == "aten.index_put.default: it writes samples into one tensor"


def test_a_function_that_fixes_the_batch_is_not_traced():
    with pytest.raises(ValueError, match=f"fixes the batch: .* = {BATCH}"):
        trace(lambda x: x.unbind(0)[0], [batched(0)], [0])


@pytest.mark.parametrize("name", ["flip", "cumsum", "softmax", "sort", "roll"])
def test_the_measure_itself_finds_a_wrong_verdict(name):
    traced = trace(lambda x: ALONG[name](x, 0), [batched(0)], [0])
    (wrong,) = (n for n in traced.analysis.reasons if name in n.name)
    traced.analysis.modes[wrong] = "split"
    with pytest.raises(AssertionError, match=name):
        check_parts(traced, (2, 3, 1))
    with pytest.raises(AssertionError, match=f"{name}.* sees sample"):
        check_others(traced, 1)
