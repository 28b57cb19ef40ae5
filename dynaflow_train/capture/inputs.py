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
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

_ATTEMPT = "_dynaflow_attempt"
_STATE = ("_parameters", "_buffers", "_modules", "['_param")


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
    name = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(name, "name", "")
    return name() if callable(name) else str(name)


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
        and value.dim() > batch_dim
    ]
    if not data:
        return BatchInputs(None, "no input tensor has a batch dimension", parameters)
    for node, _ in data:
        size = node.meta["example_value"].shape[batch_dim]
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            return BatchInputs(size.node.expr, None, parameters)
    return BatchInputs(None, _mark(data, batch_dim), parameters)


def _mark(data: list[tuple[fx.Node, torch.Tensor]], batch_dim: int) -> str:
    """Mark the batch dimension and restart; returns why not when that was tried or is useless."""
    node, first = max(data, key=lambda pair: pair[1].shape[batch_dim] > 1)
    size = int(first.shape[batch_dim])
    if size < 2:
        return f"the batch dimension of {source_name(node)} has size {size}"
    attempt = getattr(first, _ATTEMPT, 0)
    if attempt >= 2:
        return (
            f"the model fixes the batch size: tracing {source_name(node)} with a symbolic "
            f"dimension {batch_dim} gave the constant {size} again"
        )
    setattr(first, _ATTEMPT, attempt + 1)
    for _, value in data:
        value.__dict__.pop("_dynamo_weak_dynamic_indices", None)
        if value is first or (attempt == 0 and value.shape[batch_dim] == size):
            torch._dynamo.maybe_mark_dynamic(value, batch_dim)
    raise TensorifyScalarRestartAnalysis(restart_reason="dynaflow needs a symbolic batch size")
