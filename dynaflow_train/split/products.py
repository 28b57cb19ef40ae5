"""The rules of products, convolutions, tables and collectives; see `rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dynaflow_train.split.axis import (
    OWN,
    PARTIAL,
    ROWS,
    Info,
    MixesSamples,
    at,
    batch,
    expr,
    has_symbol,
    quotient,
)
from dynaflow_train.split.rules import Call, Result, follows, pointwise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.ir import Axis


def matmul(call: Call) -> Result:
    """mm, bmm, addmm, baddbmm: rows, columns or leading dimension; a contraction is an addend."""
    *addend, left, right = call.tensors
    a, b = (call.info(arg).axis for arg in (left, right))
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
    if where is None or (addend and where is PARTIAL):
        raise MixesSamples("it multiplies samples with each other")
    bias = call.info(addend[0]).axis if addend else None
    if bias is not None and at(bias, bias.dim + ndim - call.value(addend[0]).dim()) != where:
        raise MixesSamples("its addend carries the batch on another dimension")
    return where


def matrices(call: Call) -> Result:
    """Operators on matrices in the last two dimensions; those before them are independent."""
    info = pointwise(call)
    axis = info.axis if isinstance(info, Info) else None
    if axis is None or axis.dim >= call.out.dim() - 2:
        raise MixesSamples("its matrices are made of samples")
    return info


def first_dim(call: Call, *, others: Info = OWN) -> Result:
    """Attention, convolution, pooling: dimension 0 is the batch, of inputs and outputs."""
    axis = _one_axis(call, call.tensors)
    if axis.dim != 0:
        raise MixesSamples(f"it expects the batch first, found it on dimension {axis.dim}")
    info = Info("batch", axis)

    def of(value: object) -> Info:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return OWN
        return info if has_symbol(value.shape[0], call.symbol) else others

    return tuple(map(of, call.out)) if isinstance(call.out, tuple | list) else of(call.out)


def _one_axis(call: Call, tensors: Sequence[fx.Node]) -> Axis:
    axes = {axis for a in tensors if (axis := call.info(a).axis) is not None}
    if len(axes) != 1:
        raise MixesSamples("its inputs carry the batch in different orders")
    return axes.pop()


def attention_backward(call: Call) -> Result:
    """As `first_dim`; the gradient of what the samples share (a bias, say) is an addend."""
    return first_dim(call, others=PARTIAL)


def convolution(call: Call) -> Result:
    """convolution: the batch is dimension 0 of the input; weights are shared."""
    if call.info(call.args[1]).axis is not None:
        raise MixesSamples("its weight carries the batch")
    return first_dim(call)


def convolution_backward(call: Call) -> Result:
    """(input gradient, weight gradient, bias gradient) of (gradient, input, weight)."""
    if call.info(call.args[2]).axis is not None:
        raise MixesSamples("its weight carries the batch")
    first_dim(call)
    return (call.first, PARTIAL, PARTIAL)


def embedding(call: Call) -> Result:
    """A lookup per index: `embedding(weight, indices)`."""
    if call.first.axis is not None:
        raise MixesSamples("its table carries the batch")
    return call.info(call.args[1])


def embedding_backward(call: Call) -> Result:
    """embedding_dense_backward(gradient, indices, …): an addend per micro-batch."""
    if call.arg(4, "scale_grad_by_freq", False):
        raise MixesSamples("it scales by how often an index occurs in the batch")
    _one_axis(call, call.args[:2])
    if call.first.axis is None or call.info(call.args[1]).axis is None:
        raise MixesSamples("its gradient or its indices do not carry the batch")
    return PARTIAL


def index(call: Call) -> Result:
    """x[i, j, …]: a shared table read per sample, or samples read by shared indices."""
    start, width, places = _indices(call, call.args[1])
    by_sample = _aligned(call, call.args[1], start, width)
    if call.first.axis is None and len(by_sample) == 1:
        return by_sample.pop()
    if call.first.axis is None or by_sample:
        raise MixesSamples("it indexes samples by samples")
    return _picked(call.first.axis, start, width, places)


def index_put(call: Call) -> Result:
    """Rows written or added: `index_put(x, indices, values, accumulate)`."""
    indices, values = call.args[1:3]
    return _put(call, indices, [values], adds=bool(call.arg(3, "accumulate", False)))


def masked_index_put(call: Call) -> Result:
    """Rows added where a mask says: `_unsafe_masked_index_put_accumulate(x, mask, …)`."""
    _, mask, indices, values = call.args
    return _put(call, indices, [mask, values], adds=True)


def _put(call: Call, indices: Sequence[Any], values: list[Any], *, adds: bool) -> Result:
    """Shared indices: each sample gets its own values. Rows added into zeros: an addend."""
    start, width, places = _indices(call, indices)
    by_sample = _aligned(call, indices, start, width)
    given = _aligned(call, values, 0, width + call.source.dim() - len(places))
    base = call.first.axis
    if base is not None and not by_sample and given <= {_picked(base, start, width, places)}:
        return call.first
    adds = adds and _is_zero(call.args[0]) and call.out.dtype != torch.bool
    if base is None and adds and by_sample and len(by_sample | given) == 1:
        return PARTIAL
    raise MixesSamples("it writes samples into one tensor")


def _indices(call: Call, indices: Sequence[Any]) -> tuple[int, int, list[int]]:
    """(dimension of the result where the indices' own start, their number, indexed dimensions)."""
    places = [i for i, a in enumerate(indices) if a is not None]
    values = [call.value(indices[i]) for i in places]
    if any(v.dtype in (torch.bool, torch.uint8) for v in values):
        raise MixesSamples("how many rows it picks depends on a mask")
    adjacent = places == list(range(places[0], places[-1] + 1))
    return places[0] if adjacent else 0, max(v.dim() for v in values), places


def _aligned(call: Call, tensors: Sequence[Any], start: int, width: int) -> set[Info]:
    """Where the batch of broadcast tensors lies among `width` dimensions from `start` on."""
    return {
        at(axis, start + axis.dim + width - call.value(a).dim())
        for a in tensors
        if (axis := call.info(a).axis) is not None
    }


def _picked(axis: Axis, start: int, width: int, places: list[int]) -> Info:
    """Where the batch of `x` lies in `x[indices]`."""
    if axis.dim in places:
        raise MixesSamples("it picks samples out of the batch")
    gone = sum(place < axis.dim for place in places)
    return at(axis, axis.dim if axis.dim < start else axis.dim - gone + width)


def _is_zero(base: fx.Node) -> bool:
    name = getattr(base.target, "__name__", "")  # a placeholder's is text
    return name.startswith("zeros") or (name.startswith("full") and bool(base.args[-1] == 0))


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


def to_rows(call: Call) -> Result:
    """sort_pairs(index, n), sort_rows(x, .., index): samples become rows in another order."""
    last = call.args[-1]
    _first_axis(call, call.args[0] if isinstance(last, int) else last, call.args[0])
    return call.each(ROWS)


def from_rows(call: Call) -> Result:
    """unsort_rows(rows, order, place, index): rows lie as the pairs of `index` do again."""
    return Info("batch", _first_axis(call, call.args[3]))


def _first_axis(call: Call, index: fx.Node, *others: fx.Node) -> Axis:
    axis, known = call.info(index).axis, not call.infos[index].alike
    if axis is None or axis.dim != 0 or any(call.info(a).axis != axis for a in others) or not known:
        raise MixesSamples("it is not known in which order its tokens stand")
    return axis


def sum_of_rows(call: Call) -> Result:
    """grouped_wgrad: an addend per micro-batch."""
    return PARTIAL
