"""One rule per family of operators: what its outputs are when it runs on a part of the batch.

A rule takes a `Call` and gives the output's `Info` (or one per output), or raises `MixesSamples`.
Operators without a rule count as mixing samples. Here: views, elementwise operators, reductions and
what makes tensors; `products` has the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    at,
    batch,
    by_shape,
    expr,
    plain_by_shape,
    quotient,
)
from dynaflow_train.split.views import cut_axis, join_axes, reshape_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sympy

Result = Info | tuple[Info, ...]
_SAME_ROWS = re.compile(r"(full|ones|zeros)\.")
ELSEWHERE = "its inputs carry the batch on different dimensions"


@dataclass(frozen=True)
class Call:
    """One node, seen by a rule."""

    node: fx.Node
    infos: dict[fx.Node, Info]
    symbol: sympy.Symbol

    def info(self, arg: object) -> Info:
        """Info of a tensor argument; numbers and missing arguments are shared.

        Flattened rows that are all alike have the order of the tensors beside them.
        """
        info = self.infos.get(arg, SHARED) if isinstance(arg, fx.Node) else SHARED
        if (axis := info.axis) is None or not info.alike:
            return info
        others = [other.axis for other in self.given if other.axis and not other.alike]
        orders = {(a.outer, a.inner) for a in others}
        outer, inner = orders.pop() if len(orders) == 1 else (axis.outer, axis.inner)
        fits = quotient(expr(axis.outer) * axis.inner, expr(outer) * inner) == 1
        return batch(axis.dim, outer, inner) if fits else info

    @property
    def given(self) -> list[Info]:
        """What is known of each tensor argument by itself."""
        return [self.infos.get(a, SHARED) for a in self.tensors]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if len(self.node.args) > index:
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def value(self, arg: object) -> Any:
        """The fake value of an argument."""
        return arg.meta["val"] if isinstance(arg, fx.Node) else arg

    @property
    def args(self) -> Any:
        """Positional arguments."""
        return self.node.args

    @property
    def first(self) -> Info:
        """Info of the first argument."""
        return self.info(self.args[0])

    @property
    def source(self) -> Any:
        """The fake value of the first argument."""
        return self.value(self.args[0])

    @property
    def out(self) -> Any:
        """The fake value of the result."""
        return self.node.meta["val"]

    def each(self, info: Info) -> Result:
        """The same `info` for every output."""
        return tuple(info for _ in self.out) if isinstance(self.out, tuple | list) else info

    @property
    def tensors(self) -> list[fx.Node]:
        """Tensor arguments, each as often as it is given."""
        flat: list[fx.Node] = []
        fx.map_arg((self.node.args, self.node.kwargs), flat.append)
        return [a for a in flat if isinstance(a.meta.get("val"), torch.Tensor)]


Rule = Callable[[Call], Result]


def dims_of(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front; None or an empty list means all."""
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims))


def follows(rule: Callable[[Call, Axis], Result]) -> Rule:
    """A rule for the axis of the first argument; without one the outputs are as that argument."""

    @functools.wraps(rule)
    def by_first(call: Call) -> Result:
        axis = call.first.axis
        return call.each(call.first) if axis is None else rule(call, axis)

    return by_first


def pointwise(call: Call) -> Result:
    """Broadcasting operators: all batch inputs must lie on the same output dimension."""
    out = call.out[0] if isinstance(call.out, tuple | list) else call.out
    found: Info | None = None
    for arg in call.tensors:
        axis = call.info(arg).axis
        if axis is None:
            continue
        here = at(axis, axis.dim + out.dim() - call.value(arg).dim())
        if found not in (None, here):
            raise MixesSamples(ELSEWHERE)
        found = here
    if found is None:
        return OWN if any(call.info(a).sharing == "own" for a in call.tensors) else SHARED
    alike = all(info.alike for info in call.given if info != SHARED)
    drawn = torch.Tag.nondeterministic_seeded in getattr(call.node.target, "tags", ())
    return call.each(replace(found, alike=alike and not drawn))


def reduction(dim_index: int = 1, keepdim_index: int = 2, *, sums: bool = False) -> Rule:
    """sum, mean, amax, …: per sample over other dimensions; `sums`: over the batch, an addend."""

    @follows
    def rule(call: Call, axis: Axis) -> Result:
        dims = dims_of(call.arg(dim_index, "dim"), call.source.dim())
        if axis.dim in dims and not sums:
            raise MixesSamples("it reduces over the batch")
        if axis.dim in dims:
            return call.each(PARTIAL)
        kept = bool(call.arg(keepdim_index, "keepdim", False))
        gone = 0 if kept else sum(d < axis.dim for d in dims)
        return call.each(at(axis, axis.dim - gone))

    return rule


def along(dim_index: int, name: str = "dim", default: Any = -1) -> Rule:
    """softmax, cumsum, sort, flip, gather, …: fine unless they work along the batch."""

    def rule(call: Call) -> Result:
        axes = {call.info(a).axis for a in call.tensors}
        axis = axes.pop()
        if axis is None or axes:  # rows of one tensor go with the same rows of the other
            raise MixesSamples(ELSEWHERE)
        ndim = max(call.value(a).dim() for a in call.tensors)
        if axis.dim in dims_of(call.arg(dim_index, name, default), ndim):
            raise MixesSamples(f"it works along dimension {axis.dim}, the batch")
        return call.each(Info("batch", axis))

    return rule


def same(call: Call) -> Result:
    """clone, detach, all_reduce, …: the output lies as the first input."""
    return call.each(call.first)


@follows
def reshape(call: Call, axis: Axis) -> Result:
    """view, reshape: see `reshape_axis`."""
    return Info("batch", reshape_axis(axis, call.source.shape, call.out.shape, call.symbol))


def as_strided(call: Call) -> Result:
    """as_strided, where it only regroups packed rows."""
    packed = all(is_row_major(v.shape, v.stride()) for v in (call.source, call.out))
    if not packed or call.arg(3, "storage_offset", 0):
        raise MixesSamples("it addresses memory by itself")
    return reshape(call)


def expand(call: Call) -> Result:
    """expand: the batch stays where it is; a shared tensor may be expanded to the batch."""
    axis = call.first.axis
    if axis is None:
        return _one_row(call) if call.first.sharing == "shared" else call.first
    return at(axis, axis.dim + call.out.dim() - call.source.dim())


def _one_row(call: Call) -> Info:
    return replace(by_shape(call.out, call.symbol), alike=True)


@follows
def repeat(call: Call, axis: Axis) -> Result:
    """repeat: whole batches, one after another."""
    dim = axis.dim + call.out.dim() - call.source.dim()
    return batch(dim, axis.outer * expr(call.value(call.args[1][dim])), axis.inner)


@follows
def permute(call: Call, axis: Axis) -> Result:
    """permute, transpose, t."""
    ndim = call.out.dim()
    order = list(range(ndim))
    if "permute" in str(call.node.target):
        order = [d % ndim for d in call.args[1]]
    elif ndim > 1:
        a, b = call.args[1:3] if len(call.args) > 2 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return at(axis, order.index(axis.dim))


@follows
def unsqueeze(call: Call, axis: Axis) -> Result:
    """Unsqueeze: one more dimension of size 1."""
    return at(axis, axis.dim + (int(call.args[1]) % call.out.dim() <= axis.dim))


@follows
def squeeze(call: Call, axis: Axis) -> Result:
    """Squeeze of chosen dimensions (never of the batch: a batch of one must stay a batch)."""
    dims = dims_of(call.arg(1, "dim"), call.source.dim())
    if axis.dim in dims:
        raise MixesSamples("it squeezes the batch dimension")
    return at(axis, axis.dim - sum(d < axis.dim for d in dims if call.source.shape[d] == 1))


@follows
def select(call: Call, axis: Axis) -> Result:
    """Select and unbind of another dimension."""
    dim = int(call.arg(1, "dim", 0)) % call.source.dim()
    if dim == axis.dim:
        raise MixesSamples("it picks samples out of the batch")
    return call.each(at(axis, axis.dim - (dim < axis.dim)))


@follows
def slice_(call: Call, axis: Axis) -> Result:
    """slice: along the batch only by whole batches (a rank's share of gathered rows)."""
    dim = int(call.arg(1, "dim", 0)) % call.source.dim()
    bounds = [expr(call.value(call.arg(i, name) or 0)) for i, name in ((2, "start"), (3, "end"))]
    if axis.dim != dim:
        if any(call.symbol in bound.free_symbols for bound in bounds):
            raise MixesSamples("its bounds follow the number of samples")
        return call.first
    start = bounds[0]
    if call.arg(4, "step", 1) != 1 or quotient(start, call.symbol * axis.inner) is None:
        raise MixesSamples("it takes some samples out of the batch")
    return Info("batch", cut_axis(axis, expr(call.out.shape[dim]), call.symbol))


@follows
def split(call: Call, axis: Axis) -> Result:
    """split, split_with_sizes: as slice, for every piece."""
    dim = int(call.arg(2, "dim", 0)) % call.source.dim()
    if axis.dim != dim:
        return call.each(call.first)
    sizes = [expr(piece.shape[dim]) for piece in call.out]
    return tuple(Info("batch", cut_axis(axis, size, call.symbol)) for size in sizes)


def cat(call: Call) -> Result:
    """cat: every tensor carries the batch alike, or none does."""
    axes = [axis for a in call.args[0] if (axis := call.info(a).axis) is not None]
    if len(axes) < len(call.args[0]):
        raise MixesSamples("it joins tensors with and without the batch")
    if axes[0].dim == int(call.arg(1, "dim", 0)) % call.out.dim():
        return Info("batch", join_axes(axes))
    if any(axis != axes[0] for axis in axes):
        raise MixesSamples(ELSEWHERE)
    return Info("batch", axes[0])


def scatter_slice(call: Call) -> Result:
    """slice_scatter, select_scatter: part of a sample is replaced by what was made per sample."""
    base, part = (call.info(a).axis for a in call.args[:2])
    dim = int(call.arg(2, "dim", 0)) % call.out.dim()
    gone = call.value(call.args[1]).dim() < call.out.dim()
    if base is None or part is None or (base.dim == dim and gone):
        raise MixesSamples("it writes samples into one tensor")
    if part != at(base, base.dim - (gone and dim < base.dim)).axis:
        raise MixesSamples(ELSEWHERE)  # along the batch: only a part that replaces all of it
    return Info("batch", base)


@follows
def pad(call: Call, axis: Axis) -> Result:
    """constant_pad_nd(x, [last left, last right, …]): fine unless along the batch."""
    if any(call.out.dim() - 1 - i // 2 == axis.dim for i, by in enumerate(call.args[1]) if by != 0):
        raise MixesSamples("it pads the batch")
    return call.first


def create(call: Call) -> Result:
    """full, zeros, rand, …: each micro-batch makes its own rows."""
    name = getattr(call.node.target, "__name__", "")
    return replace(by_shape(call.out, call.symbol), alike=_SAME_ROWS.match(name) is not None)


def filled_like(call: Call) -> Result:
    """full_like, zeros_like, ones_like: as the first input lies, and the same all over."""
    return replace(call.first, alike=True)


def random_like(call: Call) -> Result:
    """bernoulli, native_dropout, rand_like: a draw per element of the input."""
    return create(call) if call.first.axis is None else same(call)


def whole(call: Call) -> Result:
    """Infos of what a merged run gives: cuttable afterwards where the shape alone says how."""
    expands = getattr(call.node.target, "__name__", "").startswith("expand.")
    if expands and call.first.sharing == "partial":
        return _one_row(call)

    def of(value: object) -> Info:
        return plain_by_shape(value, call.symbol) if isinstance(value, torch.Tensor) else SHARED

    return tuple(map(of, call.out)) if isinstance(call.out, tuple | list) else of(call.out)
