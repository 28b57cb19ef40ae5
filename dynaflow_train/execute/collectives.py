"""Launches collectives on plain tensors; completion is the caller's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx

from dynaflow_train import rows

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
Work = Any
Collective = Callable[[torch.Tensor, torch.Tensor, bool], Work]
RowsCollective = Callable[[Sequence[torch.Tensor], bool], tuple[torch.Tensor, Work]]
DIRECT = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})  # for `bind`


def bind(
    node: fx.Node, arguments: Sequence[Any], own: dist.ProcessGroup | None = None
) -> Collective | None:
    """`launch(input, output, asynchronous) -> Work | None` for a functional collective's node.

    The process group is called directly: torch.distributed's Python checks cost more than a launch.
    Synchronous NCCL collectives run on the current stream.

    Args:
        node: the collective.
        arguments: its arguments as numbers and names, the tensor first.
        own: the group it runs on in place of the one it names.

    Returns:
        None for a kind that has no direct form; it then runs as the functional operator.
    """
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    group = resolve(str(arguments[-1])) if own is None else own

    def done(work: Work, later: bool) -> Work:
        if later:
            return work
        if work is not None:  # NCCL gives none for what runs on the current stream
            work.wait()
        return None

    if name == "all_reduce":
        options = _options(dist.distributed_c10d.AllreduceOptions, arguments[1])
        return lambda x, out, later: done(group.allreduce([out], options[later]), later)
    if name == "all_gather_into_tensor":
        options = _options(dist.distributed_c10d.AllgatherOptions)
        return lambda x, out, later: done(group._allgather_base(out, x, options[later]), later)
    if name == "reduce_scatter_tensor":
        options = _options(dist.distributed_c10d.ReduceScatterOptions, arguments[1])
        return lambda x, out, later: done(group._reduce_scatter_base(out, x, options[later]), later)
    if name == "all_to_all_single":
        sent, received = list(arguments[2]), list(arguments[1])
        options = _options(dist.distributed_c10d.AllToAllOptions)
        return lambda x, out, later: done(
            group.alltoall_base(out, x, received, sent, options[later]), later
        )
    return None


def bind_rows(node: fx.Node, own: dist.ProcessGroup | None = None) -> RowsCollective:
    """`launch(inputs, asynchronous) -> (output, Work | None)` for `to_host` and `exchange_rows`.

    Args:
        node: the operator; its output's size is known when it is launched.
        own: the group it runs on in place of the one it names.
    """
    name = str(node.args[-1])
    if node.target is torch.ops.dynaflow.to_host.default:
        return lambda inputs, later: (torch.ops.dynaflow.to_host(*inputs, name), None)
    group, back = resolve(name) if own is None else own, bool(node.args[2])
    options = _options(dist.distributed_c10d.AllToAllOptions)

    def launch(inputs: Sequence[torch.Tensor], later: bool) -> tuple[torch.Tensor, Work]:
        given, sizes = inputs
        out, work = rows.exchange(given, sizes, group, back=back, options=options[later])
        if work is not None and not later:
            work.wait()
        return out, work if later else None

    return launch


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return dist.distributed_c10d._resolve_process_group(cast("Any", name))


def _options(kind: Callable[[], Any], reduce: str | None = None) -> tuple[Any, Any]:
    """Options for a synchronous and for an asynchronous launch."""
    both = kind(), kind()
    for later, options in enumerate(both):
        options.asyncOp = bool(later)
        if reduce is not None:
            options.reduceOp = _REDUCE[reduce]
    return both
