"""What the split stage knows of a tensor, and the refusal that makes an op run merged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy
import torch

from dynaflow_train.ir import Axis, Sharing


class MixesSamples(Exception):  # noqa: N818 - a verdict, not an error
    """This operator cannot run on a part of the batch; the message says why."""


@dataclass(frozen=True)
class Info:
    """Sharing and batch axis of one tensor.

    Attributes:
        alike: all along the axis is the same (zeros, a row that was expanded): order is free.
    """

    sharing: Sharing
    axis: Axis | None = None
    alike: bool = field(default=False, compare=False)


SHARED = Info("shared")
PARTIAL = Info("partial")
OWN = Info("own")
ROWS = Info("rows")
WHOLE = Info("batch", None)


def batch(dim: int, outer: int | sympy.Expr = 1, inner: int | sympy.Expr = 1) -> Info:
    """A tensor cut along `dim`."""
    return Info("batch", Axis(dim, outer, inner))


def at(axis: Axis, dim: int) -> Info:
    """The batch of `axis` on dimension `dim`."""
    return Info("batch", replace(axis, dim=dim))


def expr(size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
    """A size as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.sympify(size)


def has_symbol(size: int | torch.SymInt, symbol: sympy.Symbol) -> bool:
    """Whether a size depends on the batch."""
    return isinstance(size, torch.SymInt) and symbol in expr(size).free_symbols


def batch_dims(shape: torch.Size | list[int], symbol: sympy.Symbol) -> list[int]:
    """Dimensions whose size depends on the batch."""
    return [dim for dim, size in enumerate(shape) if has_symbol(size, symbol)]


def quotient(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr | int | None:
    """`size / by` when it is a whole number of samples, rows or tokens; None otherwise."""
    ratio = sympy.cancel(size / by) if by != 0 else sympy.nan
    if ratio.is_Integer:
        return int(ratio)
    if ratio.is_Rational or ratio is sympy.nan or sympy.denom(ratio) != 1:
        return None
    return ratio


def by_shape(value: torch.Tensor, symbol: sympy.Symbol) -> Info:
    """The axis of a tensor whose content does not depend on the order inside a flattened dimension.

    A flattened size `c * batch` is read batch-first. More than one dimension of batch size, or a
    size that is no multiple of it, leaves the axis unknown.
    """
    dims = batch_dims(value.shape, symbol)
    if not dims:
        return SHARED
    factor = quotient(expr(value.shape[dims[0]]), symbol)
    if len(dims) > 1 or factor is None:
        return WHOLE
    return batch(dims[0], 1, factor)


def plain_by_shape(value: torch.Tensor, symbol: sympy.Symbol) -> Info:
    """As `by_shape`, but a flattened dimension leaves the axis unknown (its order matters)."""
    info = by_shape(value, symbol)
    return info if info.axis is None or info.axis.inner == 1 else WHOLE
