"""The registry's entry for grouped products: a chain's every `aten._grouped_mm`, by choice."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from dynaflow_train.overlap_kernels import grouped_matmul as gm

if TYPE_CHECKING:
    from torch import Tensor, fx

    from dynaflow_train.overlap_kernels.registry import Function

GROUPED: Any = torch.ops.aten._grouped_mm.default


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *rest: object, sms: int | None = None) -> Tensor:
    """`aten._grouped_mm` of rows by experts' weights (forward, dgrad), or of columns (wgrad)."""
    sms = sms or gm.all_sms(a.device)
    if b.ndim == 3:
        return gm.one_pass("forward", a.contiguous(), dense(b), ends, sms, None)
    return gm.one_pass("wgrad", a.mT.contiguous(), b.contiguous(), ends, sms, None)


def dense(weight: Tensor) -> Tensor:
    """The weight itself where kernels take it as it lies, else a copy."""
    return weight if weight.mT.is_contiguous() else weight.contiguous()


@dataclass(frozen=True)
class GroupedKernel:
    """Grouped products of a chain on `sms` SMs (None: all); what else is in the chain stays.

    Each product is made by the fastest of Triton's tilings and `torch._grouped_mm`, measured at
    the first use of its shape.
    """

    sms: int | None = None
    name: str = "grouped_matmul"

    def can_run(self, graph: fx.GraphModule) -> str | None:
        """None, or why not: no grouped product, one with a bias, operands that no kernel takes."""
        nodes = [node for node in graph.graph.nodes if node.target == GROUPED]
        if not nodes:
            return "the chain holds no aten._grouped_mm"
        for node in nodes:
            if len(node.args) < 3 or node.args[2] is None or any(node.args[3:]) or node.kwargs:
                return "it takes aten._grouped_mm with offs, without bias and out_dtype"
            a, b, ends = (cast("fx.Node", one).meta["val"] for one in node.args[:3])
            if a.ndim != 2 or b.ndim == 3:
                why_not = gm.can_run(a, dense(b), ends)
            else:
                weight = a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
                why_not = gm.can_run(a.mT, weight, ends)
            if why_not is not None:
                return why_not
        return None

    def bind(self, graph: fx.GraphModule) -> Function:
        """The chain with its grouped products made here."""
        made = copy.deepcopy(graph)
        for node in made.graph.nodes:
            if node.target == GROUPED:
                node.target, node.kwargs = grouped_mm, {"sms": self.sms}
        made.recompile()
        forward = made.forward
        return lambda inputs: forward(*inputs)
