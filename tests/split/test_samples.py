"""Cut means that samples do not see each other; what nobody knows is merged."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynaflow_train.split.table import LINEAR, Rules, packet_name
from tests.split.test_rules import ALONG, ALWAYS
from tests.split.tracing import BATCH, Traced, call, check_all, trace

aten, prims = torch.ops.aten, torch.ops.prims
SHAPE = (3, 4)  # of a sample; the batch is put in front, between or behind


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Positive random values, no two alike."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def batched(at: int, seed: int = 0) -> Tensor:
    """A batch of `SHAPE`, on dimension `at`."""
    return tensor(*SHAPE[:at], BATCH, *SHAPE[at:], seed=seed)


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


def perturbed(traced: Traced, sample: int) -> dict[Any, Any]:
    """All node values after one sample of every batch input was changed."""
    values = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            info, value = traced.analysis.infos[node], traced.values[node].clone()
            if info.axis is not None and value.is_floating_point():
                value.select(info.axis.dim, sample).mul_(1.5)
            values[node] = value
        elif node.op == "call_function":
            values[node] = call(node, traced, values.get, BATCH)
    return values


CHAIN = {**ALONG, **ALWAYS}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_changing_one_sample_changes_no_other_where_it_was_cut(data):
    at = data.draw(st.integers(0, 2), "batch dimension")
    steps = data.draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(CHAIN)), st.integers(0, 2)), min_size=1, max_size=4
        )
    )

    def function(x: Tensor) -> list[Tensor]:
        results = []
        for name, dim in steps:
            if x.dim() != 3 or min(x.shape) < 2 or not x.is_floating_point():
                break
            x = CHAIN[name](x, dim)
            results.append(x)
        return results

    try:
        traced = trace(function, [batched(at)], [at])
    except (RuntimeError, IndexError) as refused:
        if "range" in str(refused) or "size" in str(refused):
            return  # a step went beyond what the one before left
        raise
    check_all(traced)
    sample = data.draw(st.integers(0, BATCH - 1), "changed sample")
    after, mixed = perturbed(traced, sample), set[Any]()
    for node, mode in traced.analysis.modes.items():
        if mode == "merged" or any(a in mixed for a in node.all_input_nodes):
            mixed.add(node)
            continue
        info = traced.analysis.infos.get(node)
        if mode != "split" or info is None or info.axis is None:
            continue
        dim, outer, inner = info.axis.dim, int(info.axis.outer), int(info.axis.inner)
        same = ~torch.isclose(after[node], traced.values[node], equal_nan=True).unflatten(
            dim, (outer, BATCH, inner)
        )
        changed = [s for s in range(BATCH) if same.select(dim + 1, s).any()]
        assert set(changed) <= {sample}, node.format_node()


def test_the_tables_name_operators_that_exist():
    rules = Rules()
    missing = [
        name
        for name in rules._table
        if not name.startswith(("_c10d", "aten.contiguous", "aten.to", "aten.unflatten"))
        and not _exists(name)
    ]
    assert missing == []
    assert all(_exists(f"aten.{n}") or _exists(f"prims.{n}") for n in LINEAR)


def _exists(name: str) -> bool:
    space, packet, *overload = name.split(".")
    found = getattr(getattr(torch.ops, space), packet, None)
    return found is not None and (not overload or overload[0] in found.overloads())


def test_packet_names():
    graph = trace(lambda x: x + 1, [batched(0)], [0]).graph
    assert [packet_name(n) for n in graph.nodes if n.op == "call_function"] == ["add"]
    assert list(itertools.chain(Rules()._table))  # the table is not empty
