"""One rule per family of operators: what its outputs are when it runs on a part of the batch.

A rule takes a `Call` and gives the output's `Info` (or one per output), or raises `MixesSamples`.
Operators without a rule count as mixing samples. `SIZES` names the arguments that are sizes and so
shrink with the micro-batch; every other number derived from the batch size keeps its full value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dynaflow_train.ir import Axis, is_row_major
from dynaflow_train.split.axis import (
    OWN,
    PARTIAL,
    SHARED,
    Info,
    MixesSamples,
    batch,
    by_shape,
    expr,
    has_symbol,
    plain_by_shape,
    quotient,
)
from dynaflow_train.split.views import cut_axis, join_axes, reshape_axis

if TYPE_CHECKING:
    import sympy

Result = Info | tuple[Info, ...]


@dataclass(frozen=True)
class Call:
    """One node, seen by a rule."""

    node: fx.Node
    infos: dict[fx.Node, Info]
    symbol: sympy.Symbol

    def info(self, arg: object) -> Info:
        """Info of a tensor argument; numbers and missing arguments are shared."""
        return self.infos.get(arg, SHARED) if isinstance(arg, fx.Node) else SHARED

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if len(self.node.args) > index:
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def value(self, arg: object) -> Any:
        """The fake value of an argument."""
        return arg.meta["val"] if isinstance(arg, fx.Node) else arg

    @property
    def out(self) -> Any:
        """The fake value of the result."""
        return self.node.meta["val"]

    @property
    def tensors(self) -> list[fx.Node]:
        """Tensor arguments, each as often as it is given."""
        flat: list[fx.Node] = []
        fx.map_arg((self.node.args, self.node.kwargs), flat.append)
        return [a for a in flat if isinstance(a.meta.get("val"), torch.Tensor)]


def dims_of(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front; None or an empty list means all."""
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims))


def pointwise(call: Call) -> Result:
    """Broadcasting operators: all batch inputs must lie on the same output dimension."""
    out = call.out[0] if isinstance(call.out, tuple | list) else call.out
    found: Info | None = None
    for arg in call.tensors:
        info = call.info(arg)
        if info.axis is None:
            continue
        dim = info.axis.dim + out.dim() - call.value(arg).dim()
        here = batch(dim, info.axis.outer, info.axis.inner)
        if found not in (None, here):
            raise MixesSamples("its inputs carry the batch on different dimensions")
        found = here
    if found is None:
        return OWN if any(call.info(a).sharing == "own" for a in call.tensors) else SHARED
    return tuple(found for _ in call.out) if isinstance(call.out, tuple | list) else found


def _reduced(call: Call, dims: tuple[int, ...], keepdim: bool, *, over_batch: Info | None) -> Info:
    axis = call.info(call.node.args[0]).axis
    if axis is None:
        return call.info(call.node.args[0])
    if axis.dim in dims:
        if over_batch is None:
            raise MixesSamples("it reduces over the batch")
        return over_batch
    gone = 0 if keepdim else sum(d < axis.dim for d in dims)
    return batch(axis.dim - gone, axis.outer, axis.inner)


def reduction(dim_index: int = 1, keepdim_index: int = 2, *, sums: bool = False) -> Rule:
    """sum, mean, amax, var_mean, …: over other dimensions per sample; `sums`: over it, an addend."""

    def rule(call: Call) -> Result:
        x = call.value(call.node.args[0])
        dims = dims_of(call.arg(dim_index, "dim"), x.dim())
        keepdim = bool(call.arg(keepdim_index, "keepdim", False))
        info = _reduced(call, dims, keepdim, over_batch=PARTIAL if sums else None)
        return tuple(info for _ in call.out) if isinstance(call.out, tuple | list) else info

    return rule


def along(dim_index: int, name: str = "dim", default: Any = -1) -> Rule:
    """softmax, cumsum, sort, flip, gather, …: fine unless they work along the batch."""

    def rule(call: Call) -> Result:
        batches = {call.info(a).axis for a in call.tensors}
        axis = batches.pop()
        if axis is None or batches:  # rows of one tensor go with the same rows of the other
            raise MixesSamples("its inputs carry the batch on different dimensions")
        ndim = max(call.value(a).dim() for a in call.tensors)
        if axis.dim in dims_of(call.arg(dim_index, name, default), ndim):
            raise MixesSamples(f"it works along dimension {axis.dim}, the batch")
        info = Info("batch", axis)
        return tuple(info for _ in call.out) if isinstance(call.out, tuple | list) else info

    return rule


def same(call: Call) -> Result:
    """clone, detach, all_reduce, …: the output lies as the first input."""
    info = call.info(call.node.args[0])
    return tuple(info for _ in call.out) if isinstance(call.out, tuple | list) else info


def reshape(call: Call) -> Result:
    """view, reshape: see `reshape_axis`."""
    info = call.info(call.node.args[0])
    if info.axis is None:
        return info
    before = call.value(call.node.args[0]).shape
    return Info("batch", reshape_axis(info.axis, before, call.out.shape, call.symbol))


def as_strided(call: Call) -> Result:
    """as_strided, where it only regroups packed rows."""
    source = call.value(call.node.args[0])
    packed = all(is_row_major(v.shape, v.stride()) for v in (source, call.out))
    if not packed or call.arg(3, "storage_offset", 0):
        raise MixesSamples("it addresses memory by itself")
    return reshape(call)


def expand(call: Call) -> Result:
    """expand: the batch stays where it is; a shared tensor may be expanded to the batch."""
    info = call.info(call.node.args[0])
    if info.axis is None:
        return by_shape(call.out, call.symbol) if info.sharing == "shared" else info
    shift = call.out.dim() - call.value(call.node.args[0]).dim()
    return batch(info.axis.dim + shift, info.axis.outer, info.axis.inner)


def permute(call: Call) -> Result:
    """permute, transpose, t."""
    info, ndim = call.info(call.node.args[0]), call.out.dim()
    if info.axis is None:
        return info
    order = list(range(ndim))
    if "permute" in str(call.node.target):
        order = [d % ndim for d in call.node.args[1]]
    elif ndim > 1:
        a, b = call.node.args[1:3] if len(call.node.args) > 2 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return batch(order.index(info.axis.dim), info.axis.outer, info.axis.inner)


def unsqueeze(call: Call) -> Result:
    """unsqueeze; stack shares it through its first tensor."""
    info = call.info(call.node.args[0])
    if info.axis is None:
        return info
    dim = int(call.node.args[1]) % call.out.dim()
    return batch(info.axis.dim + (dim <= info.axis.dim), info.axis.outer, info.axis.inner)


def squeeze(call: Call) -> Result:
    """Squeeze of chosen dimensions (never of the batch: a batch of one must stay a batch)."""
    info, x = call.info(call.node.args[0]), call.value(call.node.args[0])
    if info.axis is None:
        return info
    dims = dims_of(call.arg(1, "dim"), x.dim())
    if info.axis.dim in dims and len(call.node.args) > 1:
        raise MixesSamples("it squeezes the batch dimension")
    gone = sum(d < info.axis.dim for d in dims if x.shape[d] == 1)
    return batch(info.axis.dim - gone, info.axis.outer, info.axis.inner)


def select(call: Call) -> Result:
    """Select and unbind of another dimension."""
    info = call.info(call.node.args[0])
    if info.axis is None:
        found = info
    else:
        dim = int(call.arg(1, "dim", 0)) % call.value(call.node.args[0]).dim()
        if dim == info.axis.dim:
            raise MixesSamples("it picks samples out of the batch")
        found = batch(info.axis.dim - (dim < info.axis.dim), info.axis.outer, info.axis.inner)
    return tuple(found for _ in call.out) if isinstance(call.out, tuple | list) else found


def slice_(call: Call) -> Result:
    """slice: along the batch only by whole batches (a rank's share of gathered rows)."""
    info, x = call.info(call.node.args[0]), call.value(call.node.args[0])
    dim = int(call.arg(1, "dim", 0)) % x.dim()
    if info.axis is None or info.axis.dim != dim:
        return info
    start, size = call.arg(2, "start") or 0, call.out.shape[dim]
    start = expr(call.value(start))
    if call.arg(4, "step", 1) != 1 or quotient(start, call.symbol * info.axis.inner) is None:
        raise MixesSamples("it takes some samples out of the batch")
    return Info("batch", cut_axis(info.axis, expr(size), call.symbol))


def split(call: Call) -> Result:
    """split, split_with_sizes: as slice, for every piece."""
    info = call.info(call.node.args[0])
    dim = int(call.arg(2, "dim", 0)) % call.value(call.node.args[0]).dim()
    if info.axis is None or info.axis.dim != dim:
        return tuple(info for _ in call.out)
    axis = info.axis
    return tuple(
        Info("batch", cut_axis(axis, expr(piece.shape[dim]), call.symbol)) for piece in call.out
    )


def cat(call: Call) -> Result:
    """cat: every tensor carries the batch alike, or none does."""
    dim = int(call.arg(1, "dim", 0)) % call.out.dim()
    axes = [call.info(a).axis for a in call.node.args[0]]
    if any(axis is None for axis in axes):
        raise MixesSamples("it joins tensors with and without the batch")
    if axes[0].dim == dim:
        return Info("batch", join_axes(axes))
    if any(axis != axes[0] for axis in axes):
        raise MixesSamples("its inputs carry the batch on different dimensions")
    return Info("batch", axes[0])


def scatter_slice(call: Call) -> Result:
    """slice_scatter, select_scatter: a part of each sample is replaced by a part made per sample."""
    base, part = (call.info(a).axis for a in call.node.args[:2])
    dim = int(call.arg(2, "dim", 0)) % call.out.dim()
    gone = call.value(call.node.args[1]).dim() < call.out.dim()
    if base is None or part is None or base.dim == dim:
        raise MixesSamples("it writes samples into one tensor")
    if part != Axis(base.dim - (gone and dim < base.dim), base.outer, base.inner):
        raise MixesSamples("its inputs carry the batch on different dimensions")
    return Info("batch", base)


def pad(call: Call) -> Result:
    """constant_pad_nd(x, [last left, last right, …]): fine unless along the batch."""
    axis, ndim = call.info(call.node.args[0]).axis, call.out.dim()
    padded = [ndim - 1 - i // 2 for i, by in enumerate(call.node.args[1]) if by != 0]
    if axis is not None and axis.dim in padded:
        raise MixesSamples("it pads the batch")
    return call.info(call.node.args[0])


def matmul(call: Call) -> Result:
    """mm, bmm, addmm, baddbmm: rows, columns or leading dimension; a contraction is an addend."""
    args = call.node.args[-2:]
    biased = len(call.node.args) == 3
    a, b = (call.info(arg).axis for arg in args)
    last, ndim = call.out.dim() - 1, call.out.dim()
    where: Info | None = None
    if a is not None and b is not None:
        if ndim == 3 and a.dim == b.dim == 0 and a == b:
            where = batch(0, a.outer, a.inner)
        elif (a.dim, b.dim) == (last, last - 1) and (a.outer, a.inner) == (b.outer, b.inner):
            where = PARTIAL
    elif a is not None and a.dim == last - 1:
        where = batch(last - 1, a.outer, a.inner)
    elif b is not None and b.dim == last:
        where = batch(last, b.outer, b.inner)
    if where is None or (biased and where is PARTIAL):
        raise MixesSamples("it multiplies samples with each other")
    if biased and (bias := call.info(call.node.args[0]).axis) is not None:
        shift = ndim - call.value(call.node.args[0]).dim()
        if batch(bias.dim + shift, bias.outer, bias.inner) != where:
            raise MixesSamples("its addend carries the batch on another dimension")
    return where


def first_dim(call: Call) -> Result:
    """Attention, convolution, pooling: dimension 0 is the batch, of inputs and outputs."""
    for arg in call.tensors:
        axis = call.info(arg).axis
        if axis is not None and axis.dim != 0:
            raise MixesSamples(f"it expects the batch first, found it on dimension {axis.dim}")
    plain = {call.info(a).axis for a in call.tensors if call.info(a).axis is not None}
    if len(plain) != 1:
        raise MixesSamples("its inputs carry the batch in different orders")
    axis = plain.pop()

    def of(value: object) -> Info:
        rows = (
            isinstance(value, torch.Tensor)
            and value.dim()
            and has_symbol(value.shape[0], call.symbol)
        )
        return Info("batch", axis) if rows else OWN

    return tuple(of(v) for v in call.out) if isinstance(call.out, tuple | list) else of(call.out)


def convolution(call: Call) -> Result:
    """convolution: the batch is dimension 0 of the input; weights are shared."""
    if call.info(call.node.args[1]).axis is not None:
        raise MixesSamples("its weight carries the batch")
    return first_dim(call)


def convolution_backward(call: Call) -> Result:
    """(input gradient, weight gradient, bias gradient)."""
    first_dim(call)
    info = call.info(call.node.args[0])
    return (info, PARTIAL, PARTIAL)


def embedding(call: Call) -> Result:
    """embedding(weight, indices): a lookup per index."""
    if call.info(call.node.args[0]).axis is not None:
        raise MixesSamples("its table carries the batch")
    return call.info(call.node.args[1])


def embedding_backward(call: Call) -> Result:
    """embedding_dense_backward(grad, indices, rows, padding, scale): an addend per micro-batch."""
    if call.arg(4, "scale_grad_by_freq", False):
        raise MixesSamples("it scales by how often an index occurs in the batch")
    return PARTIAL


def _indices(call: Call) -> tuple[list[int], list[Any]]:
    given = list(call.node.args[1])
    places = [i for i, index in enumerate(given) if index is not None]
    return places, [given[i] for i in places]


def index(call: Call) -> Result:
    """x[i, j, …]: a shared table read per sample, or samples read by shared indices."""
    places, given = _indices(call)
    axis = call.info(call.node.args[0]).axis
    axes = [call.info(i).axis for i in given]
    adjacent = places == list(range(places[0], places[-1] + 1))
    width = max(call.value(i).dim() for i in given)
    at = places[0] if adjacent else 0
    if axis is None:
        aligned = {
            batch(at + a.dim + width - call.value(i).dim(), a.outer, a.inner)
            for i, a in zip(given, axes, strict=True)
            if a is not None
        }
        if len(aligned) == 1:
            return aligned.pop()
    elif not any(axes) and axis.dim not in places and adjacent:
        moved = axis.dim if axis.dim < at else axis.dim - len(places) + width
        return batch(moved, axis.outer, axis.inner)
    raise MixesSamples("it indexes samples by samples")


def index_put(call: Call, *, adds: bool = False) -> Result:
    """Rows added into zeros (the backward of an embedding): an addend per micro-batch."""
    base = call.node.args[0]
    zero = (
        isinstance(base, fx.Node)
        and base.op == "call_function"
        and (("full" in str(base.target) and base.args[-1] == 0) or "zeros" in str(base.target))
    )
    if (adds or call.arg(3, "accumulate", False)) and zero and call.info(base).axis is None:
        return PARTIAL
    raise MixesSamples("it writes samples into one tensor")


def masked_index_put(call: Call) -> Result:
    """_unsafe_masked_index_put_accumulate(base, mask, indices, values): as `index_put`."""
    return index_put(call, adds=True)


def create(call: Call) -> Result:
    """full, zeros, rand, …: each micro-batch makes its own rows."""
    return by_shape(call.out, call.symbol)


def random_like(call: Call) -> Result:
    """bernoulli, native_dropout, rand_like: a draw per element of the input."""
    return same(call) if call.info(call.node.args[0]).axis is not None else create(call)


def all_gather(call: Call) -> Result:
    """all_gather_into_tensor joins the ranks' dimension 0, rank by rank."""
    info = call.info(call.node.args[0])
    if info.axis is None or info.axis.dim != 0:
        return info
    return batch(0, info.axis.outer * call.node.args[1], info.axis.inner)


def reduce_scatter(call: Call) -> Result:
    """reduce_scatter_tensor cuts dimension 0 into one run of rows per rank."""
    info = call.info(call.node.args[0])
    if info.axis is None or info.axis.dim != 0:
        return info
    outer = quotient(expr(info.axis.outer), expr(call.node.args[2]))
    if outer is None:
        raise MixesSamples("it hands some samples to each rank")
    return batch(0, outer, info.axis.inner)


def all_to_all(call: Call) -> Result:
    """all_to_all_single exchanges runs of dimension 0."""
    info = call.info(call.node.args[0])
    if info.axis is not None and info.axis.dim == 0:
        raise MixesSamples("it exchanges samples between ranks")
    return info


def whole(call: Call) -> Result:
    """Infos of what a merged run gives: cuttable afterwards where the shape alone says how."""
    out = call.out
    if isinstance(out, tuple | list):
        return tuple(
            plain_by_shape(v, call.symbol) if isinstance(v, torch.Tensor) else SHARED for v in out
        )
    return plain_by_shape(out, call.symbol) if isinstance(out, torch.Tensor) else SHARED


Rule = Callable[[Call], Result]
