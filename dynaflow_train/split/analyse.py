"""Walks one graph and decides for every node how its result is shared and whether it may be cut.

In:  an aten graph with symbolic sizes, the `Info` of each placeholder, the batch symbol.
Out: `Analysis`: the Info of every tensor node, and the mode of every node:
     "split"  once per micro-batch,
     "merged" once, on the whole batch, with the reason, or of what such a node gave,
     "shared" once, it depends on no sample.
Nothing in the graph is changed. See docs/invariants.md.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import sympy
import torch
from torch import fx

from dynaflow_train.split.axis import (
    OWN,
    PARTIAL,
    ROWS,
    SHARED,
    WHOLE,
    Info,
    MixesSamples,
    batch_dims,
    expr,
)
from dynaflow_train.split.rules import Call, Result, whole
from dynaflow_train.split.table import LINEAR, ROW_OPERATORS, Rules, packet_name

if TYPE_CHECKING:
    from collections.abc import Mapping

Mode = Literal["split", "merged", "shared"]


@dataclass
class Analysis:
    """The verdicts of one graph, by node."""

    symbol: sympy.Symbol | None
    infos: dict[fx.Node, Info] = field(default_factory=dict)
    modes: dict[fx.Node, Mode] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    tuples: dict[fx.Node, tuple[Info, ...]] = field(default_factory=dict)


def analyse(
    graph: fx.Graph, given: Mapping[fx.Node, Info], symbol: sympy.Symbol | None
) -> Analysis:
    """Decide sharing, axis and mode of every node.

    Args:
        graph: aten graph after AOTAutograd's partition.
        given: Info of the placeholders that are not shared.
        symbol: the batch size; None means that nothing may be cut.
    """
    found, rules = Analysis(symbol), Rules()
    for node in graph.nodes:
        if node.op == "placeholder":
            found.infos[node] = given.get(node, SHARED)
        elif node.op == "get_attr":
            found.infos[node] = SHARED
        elif node.op == "call_function" and not _is_number(node.meta.get("val")):
            _visit(node, found, rules)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _visit(node: fx.Node, found: Analysis, rules: Rules) -> None:
    if node.target is operator.getitem and node.args[0] in found.tuples:
        source, place = cast("tuple[fx.Node, int]", node.args)
        found.infos[node] = found.tuples[source][place]
        found.modes[node] = found.modes[source]
        return
    if found.symbol is None:
        mode, result, reason = "shared", _like(node, SHARED), None
    else:
        mode, result, reason = _decide(node, found, rules, found.symbol)
    found.modes[node] = mode
    if reason:
        found.reasons[node] = f"{node.target}: {reason}"
    if isinstance(result, tuple):
        found.tuples[node] = result
    else:
        found.infos[node] = result


def _decide(
    node: fx.Node, found: Analysis, rules: Rules, symbol: sympy.Symbol
) -> tuple[Mode, Result, str | None]:
    call = Call(node, found.infos, symbol)
    kinds = {found.infos[a].sharing for a in call.tensors if a in found.infos}
    rule = rules.find(node)
    name = packet_name(node)
    sized = any(batch_dims(v.shape, symbol) for v in _tensors(node.meta.get("val")))
    if kinds <= {"shared"} and not sized:  # what no micro-batch need wait for is kept apart
        late = any(found.modes.get(a) == "merged" for a in node.all_input_nodes)
        return "merged" if late else "shared", _like(node, SHARED), None
    if WHOLE in (found.infos.get(a) for a in call.tensors):
        return "merged", whole(call), "an input is only known for the whole batch"
    if "partial" in kinds:
        linear = (name in LINEAR and _keeps_sums(node)) or _linear_pair(node, found, name)
        if linear and not sized:
            return "split", _like(node, PARTIAL), None
        return "merged", whole(call), "it needs a sum over the whole batch"
    if "rows" in kinds and "batch" not in kinds and name not in ROW_OPERATORS:
        return "split", _like(node, ROWS), None
    if "own" in kinds and "batch" not in kinds and not sized:
        return "split", _like(node, OWN), None
    if rule is None:
        return "merged", whole(call), "no rule says that it keeps samples apart"
    try:
        result = rule(call)
        _check_sizes(result, node.meta.get("val"), symbol)
    except MixesSamples as verdict:
        return "merged", whole(call), str(verdict)
    return "split", result, None


def _check_sizes(result: Result, value: object, symbol: sympy.Symbol) -> None:
    """Whatever a rule says: one dimension grows with the batch, the axis, and just as it says.

    Raises:
        MixesSamples: a table cut to the batch size, a dimension expanded to it, samples times
            samples; a result that depends on no sample.
    """
    several = isinstance(value, tuple | list)
    infos = result if isinstance(result, tuple) else (result,)
    for info, tensor in zip(infos, cast("Any", value if several else (value,)), strict=True):
        if not isinstance(tensor, torch.Tensor):
            continue
        if info == ROWS:
            continue
        if info.sharing == "shared":
            raise MixesSamples("it reads samples, but its result depends on none")
        dims = batch_dims(tensor.shape, symbol)
        if dims != ([] if info.axis is None else [info.axis.dim]):
            raise MixesSamples(f"its result {list(tensor.shape)} grows with the batch elsewhere")
        if info.axis is not None:
            size = info.axis.outer * symbol * info.axis.inner
            if sympy.expand(expr(tensor.shape[info.axis.dim]) - size) != 0:
                raise MixesSamples(f"its result {list(tensor.shape)} holds part of the batch")


def _keeps_sums(node: fx.Node) -> bool:
    """Whether a linear operator stays linear: a sum cast to whole numbers or truth does not."""
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
        return True
    if result.dtype == torch.bool:
        return False
    return not source.dtype.is_floating_point or result.dtype.is_floating_point


def _linear_pair(node: fx.Node, found: Analysis, name: str) -> bool:
    """`add(partial, partial)`, `mul(partial, shared)`, `div(partial, shared)` stay sums."""
    if name not in ("add", "sub", "mul", "div") or len(node.args) < 2:
        return False
    if node.kwargs.get("rounding_mode") is not None or not _keeps_sums(node):
        return False
    partial = [isinstance(a, fx.Node) and found.infos.get(a) == PARTIAL for a in node.args[:2]]
    shared = [
        not isinstance(a, fx.Node) or found.infos.get(a, SHARED) == SHARED for a in node.args[:2]
    ]
    if name in ("add", "sub"):
        return all(partial)
    return (partial[0] and shared[1]) or (name == "mul" and partial[1] and shared[0])


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    several = value if isinstance(value, tuple | list) else ()
    return [v for v in several if isinstance(v, torch.Tensor)]


def _like(node: fx.Node, info: Info) -> Result:
    value = node.meta.get("val")
    return tuple(info for _ in value) if isinstance(value, tuple | list) else info
