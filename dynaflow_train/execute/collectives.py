"""Launches collectives on plain tensors; completion is the caller's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

_REDUCE = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT,
}
Work = Any
Collective = Callable[[torch.Tensor, torch.Tensor, bool], Work]


def _renamed(new: str, old: str) -> Callable[..., Work]:
    """torch 2.13 renamed some collectives and warns at the old names."""
    return getattr(dist, new, None) or getattr(dist, old)


def bind(node: fx.Node, arguments: Sequence[Any]) -> Collective | None:
    """`launch(input, output, asynchronous) -> Work | None` for a functional collective's node.

    Args:
        node: the collective.
        arguments: its arguments as numbers and names, the tensor first.

    Returns:
        None for a kind that has no direct form; it then runs as the functional operator.
    """
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    group = dist.distributed_c10d._resolve_process_group(str(arguments[-1]))
    if name == "all_reduce":
        reduce = _REDUCE[arguments[1]]
        return lambda x, out, later: dist.all_reduce(out, reduce, group, async_op=later)
    if name == "all_gather_into_tensor":
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        return lambda x, out, later: gather(out, x, group=group, async_op=later)
    if name == "reduce_scatter_tensor":
        reduce, scatter = _REDUCE[arguments[1]], _renamed(
            "reduce_scatter_single", "reduce_scatter_tensor")
        return lambda x, out, later: scatter(out, x, op=reduce, group=group, async_op=later)
    if name == "all_to_all_single":
        sent, received = list(arguments[2]), list(arguments[1])
        return lambda x, out, later: dist.all_to_all_single(
            out, x, received, sent, group, async_op=later)
    return None
