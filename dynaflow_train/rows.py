"""Rows that leave the batch's order: operators for tokens that go to their experts and come back.

A token is sent to `k` experts, so `t` tokens are `t * k` rows. Sorted by expert they have no batch
axis any more (sharing "rows"); once received their number is known at run time only ("ragged").
An operator's fake gives ragged tensors the number of rows that were sent: right on average, and
never relied upon, since ops with ragged tensors run operator by operator.

    order, place, counts = sort_pairs(index)         [t, k] expert of each pair
    rows = sort_rows(x, order, place, index)         [t, k, h] -> [t * k, h], by expert
    sizes = to_host(counts, received, group)         [2, experts] on the host: sent, received
    rows = exchange_rows(rows, sizes, False, group)  to the ranks of the experts: ragged
    rows, ends = group_rows(rows, received, ranks)   by expert again; `ends` of each expert's rows
    rows = grouped_mm(rows, weights, ends, False)
    rows = ungroup_rows(rows, received, ranks)
    rows = exchange_rows(rows, sizes, True, group)   [t * k, h]
    x = unsort_rows(rows, order, place, index)       [t, k, h], in the batch's order
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Generator

NAMESPACE = "dynaflow"
READY = "_dynaflow_ready"  # on a tensor of the host: the event after which it may be read


@functools.cache
def define() -> Any:
    """Define the operators; gives `torch.ops.dynaflow`.

    sort_pairs: `order` of the pairs by expert, `place` of each pair in it, pairs of each expert.
    sort_rows, unsort_rows: to that order and back; `index` [t, k] tells where the batch lies.
    to_host: a copy that does not wait; who reads it does.
    exchange_rows: `sizes` [2, experts of all ranks]; `back` swaps what is sent and received.
    group_rows: rows by sender and expert, `received` [ranks * own experts], become rows by expert.
    grouped_mm: rows of expert e @ weight[e].T, or @ weight[e] if `transposed`.
    grouped_wgrad: for each expert left.T @ right of its rows. `reserve`: see `sms_left`.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, (run, fake, backward) in zip(_TAKES.split("\n")[1:], _DOES, strict=True):
        library.define(schema, tags=(torch.Tag.flexible_layout,))
        name = schema.partition("(")[0]
        library.impl(name, run, "CompositeExplicitAutograd")
        qualified = f"{NAMESPACE}::{name}"
        torch.library.register_fake(qualified, fake, lib=library)
        if backward is not None:
            torch.library.register_autograd(qualified, backward, setup_context=_save, lib=library)
    ops: Any = torch.ops.dynaflow
    ops._rows_library = library  # lives as long as its operators
    return ops


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = tuple(x for x in inputs if not isinstance(x, Tensor))


def _sort_pairs(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    numbers = torch.arange(experts, device=index.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True)
    return order, place, torch.diff(ends, prepend=ends.new_zeros(1))


def _sort_pairs_fake(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order = index.new_empty((index.shape[0] * index.shape[1],), dtype=torch.int64)
    return order, torch.empty_like(order), index.new_empty((experts,), dtype=torch.int64)


def _sort_rows(x: Tensor, order: Tensor, place: Tensor, index: Tensor) -> Tensor:
    del place, index
    copies = x.shape[1]
    if x.stride(1) == 0:  # the same row for all its experts
        return x[:, 0].index_select(0, order // copies)
    return x.flatten(0, 1).index_select(0, order)


def _sort_rows_fake(x: Tensor, order: Tensor, place: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[2]))


def _sort_rows_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    _, order, place, index = ctx.saved_tensors
    return torch.ops.dynaflow.unsort_rows(gradient, order, place, index), None, None, None


def _unsort_rows(rows: Tensor, order: Tensor, place: Tensor, index: Tensor) -> Tensor:
    del order
    return rows.index_select(0, place).view(*index.shape, rows.shape[1])


def _unsort_rows_fake(rows: Tensor, order: Tensor, place: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty((index.shape[0], index.shape[1], rows.shape[1]))


def _unsort_rows_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    _, order, place, index = ctx.saved_tensors
    return torch.ops.dynaflow.sort_rows(gradient, order, place, index), None, None, None


def _to_host(counts: Tensor, received: Tensor, group: str) -> Tensor:
    del group
    found = torch.stack([counts.flatten(), received.flatten()])
    if not found.is_cuda:
        return found
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    setattr(host, READY, ready)
    return host


def _to_host_fake(counts: Tensor, received: Tensor, group: str) -> Tensor:
    return counts.new_empty((2, counts.numel()), device="cpu")


def splits(sizes: Tensor, ranks: int, *, back: bool) -> tuple[list[int], list[int]]:
    """Rows to send to and to receive from each rank; waits until `sizes` are on the host."""
    ready = getattr(sizes, READY, None)
    if ready is not None:
        ready.synchronize()
    sent, received = sizes.view(2, ranks, -1).sum(-1).tolist()
    return (received, sent) if back else (sent, received)


def exchange(
    rows: Tensor, sizes: Tensor, group: dist.ProcessGroup, *, back: bool, options: Any = None
) -> tuple[Tensor, Any]:
    """Launch the all-to-all of rows; the rows to come and its Work."""
    sent, received = splits(sizes, group.size(), back=back)
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    options = dist.distributed_c10d.AllToAllOptions() if options is None else options
    return out, group.alltoall_base(out, rows.contiguous(), received, sent, options)


def _exchange_rows(rows: Tensor, sizes: Tensor, back: bool, group: str) -> Tensor:
    found = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    out, work = exchange(rows, sizes, found, back=back)
    if work is not None:
        work.wait()
    return out


def _exchange_rows_fake(rows: Tensor, sizes: Tensor, back: bool, group: str) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _exchange_rows_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    back, group = ctx.others
    sizes = ctx.saved_tensors[1]
    return torch.ops.dynaflow.exchange_rows(gradient, sizes, not back, group), None, None, None


def _sources(rows: Tensor, received: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """For rows by expert where each stands among rows by sender; the end of each expert's rows."""
    starts = (received.cumsum(0) - received).view(ranks, -1).t().flatten()
    sizes = received.view(ranks, -1).t().flatten()  # chunks by expert, then sender
    ends = sizes.cumsum(0)
    at = torch.arange(rows.shape[0], device=rows.device)
    chunk = torch.searchsorted(ends, at, right=True)
    source = at + (starts - (ends - sizes)).index_select(0, chunk)
    return source, ends[ranks - 1 :: ranks].to(torch.int32)


def _group_rows(rows: Tensor, received: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    source, ends = _sources(rows, received, ranks)
    return rows.index_select(0, source), ends


def _group_rows_fake(rows: Tensor, received: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    ends = received.new_empty((received.shape[0] // ranks,), dtype=torch.int32)
    return torch.empty_like(rows, memory_format=torch.contiguous_format), ends


def _group_rows_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    received, (ranks,) = ctx.saved_tensors[1], ctx.others
    return torch.ops.dynaflow.ungroup_rows(gradient, received, ranks), None, None


def _ungroup_rows(rows: Tensor, received: Tensor, ranks: int) -> Tensor:
    source, _ = _sources(rows, received, ranks)
    return torch.empty_like(rows).index_copy_(0, source, rows)


def _ungroup_rows_fake(rows: Tensor, received: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _ungroup_rows_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    received, (ranks,) = ctx.saved_tensors[1], ctx.others
    return torch.ops.dynaflow.group_rows(gradient, received, ranks)[0], None, None


def _fused(*operands: Tensor) -> bool:
    """Whether torch has one kernel for all experts: bf16 on Hopper and later."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.numel() for x in operands)


@contextlib.contextmanager
def sms_left(number: int) -> Generator[None]:
    """Products launched within leave as many SMs to others: collectives, say. 0 changes nothing.

    Internal to torch (2.11 to 2.13): it reaches `_grouped_mm`, not cuBLAS' plain products.
    """
    before = torch._C._get_sm_carveout_experimental()
    if number:
        torch._C._set_sm_carveout_experimental(number)
    try:
        yield
    finally:
        if number:
            torch._C._set_sm_carveout_experimental(before)


def _grouped_mm(
    rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, reserve: int = 0
) -> Tensor:
    right = weight if transposed else weight.transpose(1, 2)
    if _fused(rows, weight):
        with sms_left(reserve):
            return torch._grouped_mm(rows, right, offs=ends)
    out, start = rows.new_empty((rows.shape[0], right.shape[2])), 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end], right[expert], out=out[start:end])
        start = end
    return out


def _grouped_mm_fake(
    rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, reserve: int = 0
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2 if transposed else 1]))


def _grouped_mm_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (transposed, reserve), (rows, weight, ends) = ctx.others, ctx.saved_tensors
    ops = torch.ops.dynaflow
    left, right = (rows, gradient) if transposed else (gradient, rows)
    wgrad = ops.grouped_wgrad(left, right, ends, reserve) if ctx.needs_input_grad[1] else None
    return ops.grouped_mm(gradient, weight, ends, not transposed, reserve), wgrad, *[None] * 3


def _grouped_wgrad(left: Tensor, right: Tensor, ends: Tensor, reserve: int = 0) -> Tensor:
    if _fused(left, right):
        with sms_left(reserve):
            return torch._grouped_mm(left.t(), right, offs=ends)
    out, start = left.new_empty((ends.numel(), left.shape[1], right.shape[1])), 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


def _grouped_wgrad_fake(left: Tensor, right: Tensor, ends: Tensor, reserve: int = 0) -> Tensor:
    return left.new_empty((ends.shape[0], left.shape[1], right.shape[1]))


_TAKES = """
sort_pairs(Tensor index, int experts) -> (Tensor, Tensor, Tensor)
sort_rows(Tensor x, Tensor order, Tensor place, Tensor index) -> Tensor
unsort_rows(Tensor rows, Tensor order, Tensor place, Tensor index) -> Tensor
to_host(Tensor counts, Tensor received, str group) -> Tensor
exchange_rows(Tensor rows, Tensor sizes, bool back, str group) -> Tensor
group_rows(Tensor rows, Tensor received, int ranks) -> (Tensor, Tensor)
ungroup_rows(Tensor rows, Tensor received, int ranks) -> Tensor
grouped_mm(Tensor rows, Tensor weight, Tensor ends, bool transposed, int reserve=0) -> Tensor
grouped_wgrad(Tensor left, Tensor right, Tensor ends, int reserve=0) -> Tensor"""
_DOES: tuple[tuple[Any, Any, Any], ...] = (  # what it does, its fake, its backward
    (_sort_pairs, _sort_pairs_fake, None),
    (_sort_rows, _sort_rows_fake, _sort_rows_backward),
    (_unsort_rows, _unsort_rows_fake, _unsort_rows_backward),
    (_to_host, _to_host_fake, None),
    (_exchange_rows, _exchange_rows_fake, _exchange_rows_backward),
    (_group_rows, _group_rows_fake, _group_rows_backward),
    (_ungroup_rows, _ungroup_rows_fake, _ungroup_rows_backward),
    (_grouped_mm, _grouped_mm_fake, _grouped_mm_backward),
    (_grouped_wgrad, _grouped_wgrad_fake, None),
)
