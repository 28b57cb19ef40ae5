"""The rules of products, convolutions, tables and collectives; see `rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dynaflow_train.split.axis import (
    OWN,
    PARTIAL,
    Info,
    MixesSamples,
    at,
    batch,
    expr,
    has_symbol,
    quotient,
)
from dynaflow_train.split.rules import Call, Result, follows

if TYPE_CHECKING:
    from dynaflow_train.ir import Axis


def matmul(call: Call) -> Result:
    """mm, bmm, addmm, baddbmm: rows, columns or leading dimension; a contraction is an addend."""
    biased = len(call.args) == 3
    a, b = (call.info(arg).axis for arg in call.args[-2:])
    last, ndim = call.out.dim() - 1, call.out.dim()
    where: Info | None = None
    if a is not None and b is not None:
        if ndim == 3 and a.dim == b.dim == 0 and a == b:
            where = Info("batch", a)
        elif (a.dim, b.dim) == (last, last - 1) and (a.outer, a.inner) == (b.outer, b.inner):
            where = PARTIAL
    elif a is not None and a.dim == last - 1:
        where = Info("batch", a)
    elif b is not None and b.dim == last:
        where = Info("batch", b)
    if where is None or (biased and where is PARTIAL):
        raise MixesSamples("it multiplies samples with each other")
    bias = call.first.axis if biased else None
    if bias is not None and at(bias, bias.dim + ndim - call.source.dim()) != where:
        raise MixesSamples("its addend carries the batch on another dimension")
    return where


def first_dim(call: Call) -> Result:
    """Attention, convolution, pooling: dimension 0 is the batch, of inputs and outputs."""
    axes = {axis for a in call.tensors if (axis := call.info(a).axis) is not None}
    for axis in axes:
        if axis.dim != 0:
            raise MixesSamples(f"it expects the batch first, found it on dimension {axis.dim}")
    if len(axes) != 1:
        raise MixesSamples("its inputs carry the batch in different orders")
    info = Info("batch", axes.pop())

    def of(value: object) -> Info:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return OWN
        return info if has_symbol(value.shape[0], call.symbol) else OWN

    return tuple(map(of, call.out)) if isinstance(call.out, tuple | list) else of(call.out)


def convolution(call: Call) -> Result:
    """convolution: the batch is dimension 0 of the input; weights are shared."""
    if call.info(call.args[1]).axis is not None:
        raise MixesSamples("its weight carries the batch")
    return first_dim(call)


def convolution_backward(call: Call) -> Result:
    """(input gradient, weight gradient, bias gradient)."""
    first_dim(call)
    return (call.first, PARTIAL, PARTIAL)


def embedding(call: Call) -> Result:
    """A lookup per index: `embedding(weight, indices)`."""
    if call.first.axis is not None:
        raise MixesSamples("its table carries the batch")
    return call.info(call.args[1])


def embedding_backward(call: Call) -> Result:
    """embedding_dense_backward: an addend per micro-batch."""
    if call.arg(4, "scale_grad_by_freq", False):
        raise MixesSamples("it scales by how often an index occurs in the batch")
    return PARTIAL


def index(call: Call) -> Result:
    """x[i, j, …]: a shared table read per sample, or samples read by shared indices."""
    given: list[tuple[int, Any]] = [(i, a) for i, a in enumerate(call.args[1]) if a is not None]
    places = [i for i, _ in given]
    axis = call.first.axis
    adjacent = places == list(range(places[0], places[-1] + 1))
    width = max(call.value(a).dim() for _, a in given)
    start = places[0] if adjacent else 0
    aligned = {
        at(found, start + found.dim + width - call.value(a).dim())
        for _, a in given
        if (found := call.info(a).axis) is not None
    }
    if axis is None and len(aligned) == 1:
        return aligned.pop()
    if axis is not None and not aligned and axis.dim not in places and adjacent:
        return at(axis, axis.dim if axis.dim < start else axis.dim - len(places) + width)
    raise MixesSamples("it indexes samples by samples")


def index_put(call: Call, *, adds: bool = False) -> Result:
    """Rows added into zeros (the backward of an embedding): an addend per micro-batch."""
    base = call.args[0]
    zero = (
        isinstance(base, fx.Node)
        and base.op == "call_function"
        and (("full" in str(base.target) and base.args[-1] == 0) or "zeros" in str(base.target))
    )
    if (adds or call.arg(3, "accumulate", False)) and zero and call.first.axis is None:
        return PARTIAL
    raise MixesSamples("it writes samples into one tensor")


def masked_index_put(call: Call) -> Result:
    """_unsafe_masked_index_put_accumulate(base, mask, indices, values): as `index_put`."""
    return index_put(call, adds=True)


@follows
def all_gather(call: Call, axis: Axis) -> Result:
    """all_gather_into_tensor joins the ranks' dimension 0, rank by rank."""
    return call.first if axis.dim != 0 else batch(0, axis.outer * call.args[1], axis.inner)


@follows
def reduce_scatter(call: Call, axis: Axis) -> Result:
    """reduce_scatter_tensor cuts dimension 0 into one run of rows per rank."""
    if axis.dim != 0:
        return call.first
    outer = quotient(expr(axis.outer), expr(call.args[2]))
    if outer is None:
        raise MixesSamples("it hands some samples to each rank")
    return batch(0, outer, axis.inner)


@follows
def all_to_all(call: Call, axis: Axis) -> Result:
    """all_to_all_single exchanges runs of dimension 0."""
    if axis.dim == 0:
        raise MixesSamples("it exchanges samples between ranks")
    return call.first
