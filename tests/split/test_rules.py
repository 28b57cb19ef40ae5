"""What the rules call cuttable gives the same on parts of the batch, operator by operator."""

from __future__ import annotations

import functools

import pytest
import torch

from dynaflow_train.split.table import LINEAR, SIZE_OPERATORS, VIEWS, Rules
from tests.split.blocks import BLOCKS
from tests.split.cases import ALONG, ALWAYS, DIMENSIONS, FLAT, THREE, batched, dimensions
from tests.split.operators import PLAIN
from tests.split.pointwise import GROUPS, INPUTS, all_of
from tests.split.tracing import Traced, check, trace

ONE, SEVERAL = {**ALONG, **ALWAYS, **FLAT}, {**PLAIN, **BLOCKS}


@functools.cache
def one(name: str) -> Traced:
    """One tensor, cut along each of its dimensions; flattened ones along the first."""
    places = (0,) if name in FLAT else (0, 1, 2)
    function = dimensions(ONE[name], DIMENSIONS if name in ALONG else THREE)
    return trace(function, [batched(at) for at in places], places)


@functools.cache
def several(name: str) -> Traced:
    """Several tensors."""
    case = SEVERAL[name]
    return trace(case.function, case.tensors, case.batch_dims)


@functools.cache
def pointwise(group: int) -> Traced:
    """A group of elementwise operators."""
    return trace(all_of(group), INPUTS, [0] * len(INPUTS))


@pytest.mark.parametrize("name", ALONG)
def test_along_the_batch_it_is_merged_along_others_cut(name):
    traced = one(name)
    check(traced)
    merged = dict(zip(DIMENSIONS, traced.merged_before(), strict=True))
    wanted = {
        (at, d): at == d % 3 or ("of two" in name and at == (d + 1) % 3) for at, d in DIMENSIONS
    }
    assert merged == wanted, traced.analysis.reasons


@pytest.mark.parametrize("name", [*ALWAYS, *FLAT])
def test_what_keeps_samples_apart_is_cut(name):
    traced = one(name)
    check(traced)
    assert set(traced.modes()) <= {"split", "shared"}, traced.analysis.reasons


@pytest.mark.parametrize("name", SEVERAL)
def test_several_tensors(name):
    traced, case = several(name), SEVERAL[name]
    check(traced)
    assert any(traced.merged_before()) != case.is_cut, traced.analysis.reasons


@pytest.mark.parametrize("group", range(GROUPS))
def test_what_torch_calls_pointwise_is(group):
    traced = pointwise(group)
    check(traced)
    assert "merged" not in traced.modes(), traced.analysis.reasons


def test_every_operator_of_the_table_has_a_case():
    covered = set[str]()
    groups = [pointwise(group) for group in range(GROUPS)]
    for traced in [one(n) for n in ONE] + [several(n) for n in SEVERAL] + groups:
        for node, mode in traced.analysis.modes.items():
            target = node.target
            if mode == "split" and isinstance(target, torch._ops.OpOverload):
                name = target._schema.name.replace("::", ".")
                covered |= {name, f"{name}.{target._overloadname}"}
    missing = sorted(set(Rules()._table) - covered - {"dynaflow.forked_dropout"})
    assert not missing, f"no case has: {missing}"


def test_dropout_in_a_fork_draws_for_each_sample():
    library = torch.library.Library("dynaflow", "FRAGMENT")  # as integrations/megatron defines it
    library.define("forked_dropout(Tensor x, float p) -> (Tensor, Tensor)")
    library.impl("forked_dropout", lambda x, p: (x, x > p), "CompositeExplicitAutograd")
    torch.library.register_fake(
        "dynaflow::forked_dropout", lambda x, p: (torch.empty_like(x), x > p), lib=library
    )
    traced = trace(lambda x: torch.ops.dynaflow.forked_dropout(x, 0.5), [batched(1)], [1])
    check(traced)
    assert traced.modes("forked_dropout") == ["split"]
    library._destroy()


def test_operators_that_write_or_look_at_all_have_no_rule():
    graph, rules = torch.fx.Graph(), Rules()
    for operator in (torch.ops.aten.equal.default, torch.ops.aten.add_.Tensor, len):
        assert rules.find(graph.call_function(operator)) is None


def test_the_sets_name_operators_that_exist():
    names = {*SIZE_OPERATORS, *VIEWS, *LINEAR}
    assert [
        n for n in names if not hasattr(torch.ops.aten, n) and not hasattr(torch.ops.prims, n)
    ] == []
