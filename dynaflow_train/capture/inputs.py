"""The graph's inputs: which are data, and the symbol that stands for the batch size.

Dynamo takes sizes as constants until it is told otherwise. Where the caller did not tell it
(`torch.compile(model, backend="dynaflow")`), the backend marks the batch dimension of the data
inputs and asks Dynamo to trace once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._guards import CompileContext

_ATTEMPTS = "_dynaflow_attempts"
_STATE = ("_parameters", "_buffers", "_modules", "['_param")
Input = tuple[fx.Node, torch.Tensor]


@dataclass(frozen=True)
class BatchInputs:
    """What capture knows of the inputs.

    Attributes:
        symbol: the batch size in every shape; None when nothing may be cut.
        why_not: the reason for None.
        parameters: for every placeholder whether it is a parameter (its gradient is a wgrad).
    """

    symbol: sympy.Symbol | None
    why_not: str | None
    parameters: tuple[bool, ...]


def source_name(node: fx.Node) -> str:
    """Where a placeholder comes from, as Python source (`L['x']`)."""
    name: Any = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)


def make_batch_symbolic(
    gm: fx.GraphModule, example_inputs: list[Any], batch_dim: int
) -> BatchInputs:
    """Find the batch symbol; where there is none, ask Dynamo to trace again with one.

    Raises:
        TensorifyScalarRestartAnalysis: for Dynamo, which then traces anew.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(placeholders, example_inputs, strict=True))
    parameters = tuple(isinstance(value, torch.nn.Parameter) for _, value in pairs)
    data = [
        (node, value)
        for node, value in pairs
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and not any(part in source_name(node) for part in _STATE)
        and not source_name(node).startswith(("G[", "L['self']"))
        and value.dim() > batch_dim
    ]
    symbol, why_not = _find(data, batch_dim)
    return BatchInputs(symbol, why_not, parameters)


def _find(data: list[Input], batch_dim: int) -> tuple[sympy.Symbol | None, str | None]:
    """The batch symbol, or why there is none; marks and restarts where that was not tried yet.

    Candidates are the inputs by their number of elements, one of each size: a batch lies on the
    largest, beside which masks and tables are small. Each is tried twice, first with all inputs of
    its size, then alone (another may have that size by chance).
    """
    candidates: dict[int, Input] = {}
    for node, value in sorted(data, key=lambda pair: -pair[1].numel()):
        candidates.setdefault(int(value.shape[batch_dim]), (node, value))
    compile_id = CompileContext.current_compile_id()
    tried = max((_attempts(value, compile_id) for _, value in data), default=0)
    why_not = "no input tensor has a batch dimension"
    for place, (size, (node, value)) in enumerate(candidates.items()):
        name = source_name(node)
        if size < 2:
            why_not = f"the batch dimension of {name} has size {size}"
            continue
        symbol = _symbol(node, batch_dim)
        if symbol is not None and not _is_elsewhere(symbol, data, batch_dim):
            _unify(node, data, batch_dim)
            return _symbol(node, batch_dim), None
        if tried <= 2 * place + 1 and symbol is None:
            alike = [v for _, v in data if v.shape[batch_dim] == size]
            _mark(data, alike if tried <= 2 * place else [value], batch_dim)
            for _, each in data:
                vars(each)[_ATTEMPTS] = (compile_id, max(tried, 2 * place) + 1)
            raise _TraceAgain(restart_reason="dynaflow needs a symbolic batch size")
        why_not = (
            f"the model fixes the batch size: tracing {name} with a symbolic dimension {batch_dim} "
            f"gave the constant {size} again"
        )
    _mark(data, [], batch_dim)
    return None, why_not


class _TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Of the first, because a backend may raise it; of the second, because another graph comes."""


def _attempts(value: torch.Tensor, compile_id: object) -> int:
    """How often this compilation was restarted with `value` among its inputs."""
    owner, number = vars(value).get(_ATTEMPTS, (None, 0))
    return number if owner == compile_id else 0


def _symbol(node: fx.Node, dim: int) -> sympy.Symbol | None:
    size = node.meta["example_value"].shape[dim]
    found = size.node.expr if isinstance(size, torch.SymInt) else None
    return found if isinstance(found, sympy.Symbol) else None


def _is_elsewhere(symbol: sympy.Symbol, data: list[Input], batch_dim: int) -> bool:
    """Whether it is some other dimension's size too, as the sequence length of a rotary table."""
    return any(
        isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols
        for node, _ in data
        for dim, size in enumerate(node.meta["example_value"].shape)
        if dim != batch_dim
    )


def _unify(node: fx.Node, data: list[Input], batch_dim: int) -> None:
    """Inputs that grew alike are one batch: guard on it, so that one symbol stands for all."""
    batch = node.meta["example_value"].shape[batch_dim]
    for other, _ in data:
        symbol = _symbol(other, batch_dim)
        size = other.meta["example_value"].shape[batch_dim]
        if symbol in (None, batch.node.expr) or size.node.hint != batch.node.hint:
            continue
        if not _is_elsewhere(symbol, data, batch_dim):
            bool(size == batch)


def _mark(data: list[Input], chosen: list[torch.Tensor], batch_dim: int) -> None:
    """Mark the batch dimension of `chosen` alone."""
    for _, value in data:
        for name in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"):
            vars(value).pop(name, None)
        if any(value is each for each in chosen):
            torch._dynamo.maybe_mark_dynamic(value, batch_dim)
