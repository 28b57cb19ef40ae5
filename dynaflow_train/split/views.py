"""Where the batch axis goes when a tensor is reshaped, cut or joined along it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from dynaflow_train.ir import Axis
from dynaflow_train.split.axis import MixesSamples, expr, quotient

if TYPE_CHECKING:
    from collections.abc import Sequence


def _product(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*sizes) if sizes else sympy.Integer(1)


def reshape_axis(
    axis: Axis, before: Sequence[int], after: Sequence[int], symbol: sympy.Symbol
) -> Axis:
    """The batch axis after `view`/`reshape` from sizes `before` to `after`.

    Rows keep their row-major order, so the batch index stays the digit between the sizes in front
    of it (`outer`) and behind it (`inner`); the dimension of `after` that holds that digit, and
    only whole sizes on either side, carries the axis.

    Raises:
        MixesSamples: no dimension of `after` holds the batch in one piece.
    """
    old, new = [expr(s) for s in before], [expr(s) for s in after]
    outer = _product(old[: axis.dim]) * axis.outer
    inner = axis.inner * _product(old[axis.dim + 1 :])
    for dim, size in enumerate(new):
        if symbol not in size.free_symbols:
            continue
        front = quotient(sympy.sympify(outer), _product(new[:dim]))
        back = quotient(sympy.sympify(inner), _product(new[dim + 1 :]))
        if front is None or back is None:
            break
        return Axis(dim, front, back)
    raise MixesSamples(f"reshape from {list(before)} to {list(after)} takes the batch apart")


def cut_axis(axis: Axis, size: sympy.Expr, symbol: sympy.Symbol) -> Axis:
    """The axis of one piece of `size` rows cut off along the batch dimension itself.

    Only pieces that hold the whole batch (a rank's share of an all-gather) stay cuttable.

    Raises:
        MixesSamples: the piece holds some samples only.
    """
    outer = quotient(size, symbol * axis.inner)
    if outer is None:
        raise MixesSamples("it takes some samples out of the batch")
    return Axis(axis.dim, outer, axis.inner)


def join_axes(axes: Sequence[Axis]) -> Axis:
    """The axis after `cat` along the batch dimension of tensors that each hold the whole batch.

    Raises:
        MixesSamples: the rows of the pieces do not interleave the same way.
    """
    first = axes[0]
    if any((a.dim, a.inner) != (first.dim, first.inner) for a in axes):
        raise MixesSamples("it joins tensors along the batch whose rows are ordered differently")
    return Axis(first.dim, sum(a.outer for a in axes), first.inner)
