"""Ends an op's graph in memory that it is given: over what is there, or added to it.

A matrix product writes there itself, without a result of its own that would be copied: Inductor
does so for pointwise operators and reductions only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, fx
from torch._inductor import lowering

from dynaflow_train.execute.meta import Meta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

Written = Literal["direct", "fused", "copied"]
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)
_BIASED = (_aten.addmm.default, _aten.baddbmm.default)
_EXTERN = (*_PRODUCTS, *_BIASED, _aten.convolution.default)


@functools.cache
def product_into() -> OpOverload:
    """`dynaflow::product_into(out, left, right, bias, add)`, in place on `out`.

    out = left @ right, or out += left @ right where `add`, or out = bias + left @ right: of
    matrices [m, k] and [k, n], or of batches of them. The operands keep the strides they have
    (`flexible_layout`), so that a transposed one is not copied. A sum of fp32 takes products of
    narrower operands unrounded: one kernel on CUDA; elsewhere, for rehearsal, widened operands.
    """
    library = torch.library.Library("dynaflow", "FRAGMENT")
    library.define(
        "product_into(Tensor(a!) out, Tensor left, Tensor right, Tensor? bias, bool add) -> ()",
        tags=(torch.Tag.flexible_layout,),
    )

    def product_into(
        out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, add: bool
    ) -> None:
        plain, added = (torch.mm, torch.addmm) if out.dim() == 2 else (torch.bmm, torch.baddbmm)
        if add and out.dtype != left.dtype:
            if out.is_cuda:
                added(out, left, right, out_dtype=out.dtype, out=out)
            else:
                added(out, left.to(out.dtype), right.to(out.dtype), out=out)
        elif bias is None and not add:
            plain(left, right, out=out)
        else:
            added(out if bias is None else bias, left, right, out=out)

    library.impl("product_into", product_into, "CompositeExplicitAutograd")
    product_into._library = library  # type: ignore[attr-defined]  # lives as long as its operator
    return torch.ops.dynaflow.product_into.default


def write_into(
    into: fx.Node, made: fx.Node, *, alone: bool, add: bool, eager: bool = False
) -> Written:
    """End a graph by writing `made` into `into`.

    Args:
        into: a placeholder; its memory is a slice of a buffer, or a sum so far.
        made: what is written, of the same shape.
        alone: nothing else is written or returned that is the same node.
        add: add to what is there.
        eager: the graph runs operator by operator; those with an `out=` form write by it.

    Returns:
        How: by what computes it, fused into what computes it (by Inductor), or copied.
    """
    graph = into.graph
    root, views = _root(made)
    alone = alone and not any(len(node.users) > 1 for node in (root, *views)) and not made.users
    if alone and (write := _direct(root, add=add, eager=eager)) and _fits(into, root, views, add):
        with graph.inserting_before(root):
            out = into
            if into.meta["val"].shape != root.meta["val"].shape:
                shape = list(root.meta["val"].shape)
                out = graph.call_function(_aten.view.default, (into, shape))
                out.meta["val"] = into.meta["val"].view(shape)
            write(out)
        for node in (*views, root):
            graph.erase_node(node)
        return "direct"
    operator = _aten.add_.Tensor if add else _aten.copy_.default
    written = graph.call_function(operator, (into, made))
    written.meta["val"] = into.meta["val"]
    if add or not (eager or root.op != "call_function" or _is_extern(root)):
        return "fused"
    return "copied"


def factors(made: fx.Node, *, alone: bool) -> tuple[fx.Node, fx.Node] | None:
    """The two matrices whose product `made` is, if nothing else is computed or read of it.

    Their rows and its are the same, so that it can be made in parts.
    """
    root, views = _root(made)
    chain = [*views, root]
    alone = alone and not made.users and not any(len(n.users) > 1 for n in chain)
    if not alone or root.target != _aten.mm.default:
        return None
    left, right = cast("tuple[fx.Node, fx.Node]", root.args)
    return left, right


def _direct(root: fx.Node, *, add: bool, eager: bool) -> Callable[[fx.Node], Any] | None:
    """Calls what computes `root` straight into a node's memory, if there is such an operator."""
    biased = root.target in _BIASED and not root.kwargs and not add
    if biased or root.target in _PRODUCTS:
        bias, left, right = root.args if biased else (None, *root.args)
        return lambda out: root.graph.call_function(product_into(), (out, left, right, bias, add))
    form = _out_form(root.target) if eager and not add else None
    if form is None:
        return None
    return lambda out: root.graph.call_function(form, root.args, {**root.kwargs, "out": out})


def _out_form(target: Any) -> OpOverload | None:
    """The overload of an aten operator that takes the same and writes into `out`."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        form = getattr(target.overloadpacket, name)
        taken = [(a.name, str(a.type)) for a in form._schema.arguments if not a.is_out]
        outs = [a.name for a in form._schema.arguments if a.is_out]
        if outs == ["out"] and taken == wanted:
            return form
    return None


def _root(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a chain of views of one shape after another starts from, and the views, last first."""
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        node = node.all_input_nodes[0]
    return node, views


def _fits(into: fx.Node, root: fx.Node, views: Sequence[fx.Node], add: bool) -> bool:
    target, made = into.meta["val"], root.meta["val"]
    narrow = made.dtype in (torch.bfloat16, torch.float16)
    alike = target.dtype == made.dtype or (add and narrow and target.dtype == torch.float32)
    dense = Meta.of(target).is_contiguous or (not views and root.target not in _PRODUCTS + _BIASED)
    return alike and dense


def _is_extern(node: fx.Node) -> bool:
    """Whether Inductor calls a library for it, or for what it is a part of."""
    target: Any = node.target
    while getattr(target, "__name__", "") == "getitem":
        node = node.all_input_nodes[0]
        target = node.target
    return target in _EXTERN or target in lowering.fallbacks
