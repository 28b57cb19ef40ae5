"""The registry's entry for grouped products: each in a chain, by the fastest way to make it.

Of torch's own (`aten._grouped_mm`) and of rows at their experts (`rows.grouped_mm` and
`grouped_wgrad`, which expert parallelism runs forward and backward).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, fx

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.overlap_kernels.choice import Function

GROUPED = "aten._grouped_mm.default"


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *rest: object, sms: int | None = None) -> Tensor:
    """`aten._grouped_mm` of rows by experts' weights (forward, dgrad), or of columns (wgrad)."""
    gm = _products()
    sms = sms or gm.all_sms(a.device)
    if b.ndim == 3:
        return gm.one_pass("forward", a.contiguous(), dense(b), ends, sms, None)
    return gm.one_pass("wgrad", a.mT.contiguous(), b.contiguous(), ends, sms, None)


def rows_mm(
    rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, reserve: int = 0,
    *, sms: int | None = None,
) -> Tensor:  # fmt: skip
    """`rows.grouped_mm`: [n, in] by [experts, out, in], or [experts, in, out] if `transposed`."""
    weight = weight if transposed else weight.mT
    if not rows.shape[0]:
        return rows.new_empty(0, weight.shape[2])
    return _ragged("forward", rows.contiguous(), dense(weight), ends, reserve, sms)


def rows_wgrad(
    left: Tensor, right: Tensor, ends: Tensor, reserve: int = 0, *, sms: int | None = None
) -> Tensor:
    """`rows.grouped_wgrad`: left.T @ right of each expert's rows: [experts, M, N]."""
    if not left.shape[0]:
        return left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    return _ragged("wgrad", left.contiguous(), right.contiguous(), ends, reserve, sms)


def _ragged(name: Any, a: Tensor, b: Tensor, ends: Tensor, reserve: int, sms: int | None) -> Tensor:
    """One pass; measured for the next power of two of its rows, whose number always changes."""
    gm = _products()
    sms = sms or gm.all_sms(a.device) - reserve
    like = a[:1].expand(1 << (a.shape[0] - 1).bit_length(), -1)  # its shape is all that counts
    return gm.run(name, a, b, ends, gm.choose(name, like, b, ends, sms), sms)


def dense(weight: Tensor) -> Tensor:
    """The weight itself where kernels take it as it lies, else a copy."""
    return weight if weight.mT.is_contiguous() else weight.contiguous()


def _products() -> Any:
    from dynaflow_train.overlap_kernels import grouped_matmul  # noqa: PLC0415 - needs Triton

    return grouped_matmul


REPLACED: dict[str, Callable[..., Tensor]] = {
    GROUPED: grouped_mm,
    "dynaflow.grouped_mm.default": rows_mm,
    "dynaflow.grouped_wgrad.default": rows_wgrad,
}


@dataclass(frozen=True)
class GroupedKernel:
    """Grouped products of a chain on `sms` SMs; what else is in the chain stays, uncompiled.

    Each product is made by the fastest of Triton's tilings and `torch._grouped_mm`, measured at
    the first use of its shape. Without `sms` it has all but those that the product reserves.
    """

    sms: int | None = None
    name: str = "grouped_matmul"

    def can_run(self, graph: fx.GraphModule) -> str | None:
        """None, or why not: no grouped product, one with a bias, operands that no kernel takes."""
        nodes = [node for node in graph.graph.nodes if str(node.target) in REPLACED]
        if not nodes:
            return f"the chain holds no grouped product ({', '.join(REPLACED)})"
        if importlib.util.find_spec("triton") is None:
            return "it needs Triton, which is not installed"
        return next((why for why in map(_why_not, nodes) if why is not None), None)

    def bind(self, graph: fx.GraphModule) -> Function:
        """The chain with its grouped products made here."""
        made = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        made.output(made.graph_copy(graph.graph, copies))
        for node in made.nodes:
            if str(node.target) in REPLACED:
                node.target, node.kwargs = REPLACED[str(node.target)], {"sms": self.sms}
        forward = fx.GraphModule(graph, made).forward
        return lambda inputs: forward(*inputs)


def _why_not(node: fx.Node) -> str | None:
    """None, or why this product is out of reach."""
    torchs = str(node.target) == GROUPED
    if torchs and (len(node.args) < 3 or node.args[2] is None or any(node.args[3:]) or node.kwargs):
        return "it takes aten._grouped_mm with offs, without bias and out_dtype"
    a, b, ends = (cast("fx.Node", one).meta["val"] for one in node.args[:3])
    if b.ndim == 3:
        weight = b if torchs or node.args[3] else b.mT
        return _products().can_run(a, dense(weight), ends)
    if a.dtype != b.dtype:
        return f"both operands must be alike, found {a.dtype} and {b.dtype}"
    left = a.mT if torchs else a  # columns: taken as rows by a weight of the gradient's shape
    weight = a.new_empty(ends.shape[0], left.shape[1], b.shape[1])
    return _products().can_run(left, weight, ends)
