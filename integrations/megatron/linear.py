"""Column- and row-parallel linears: Megatron's sums in Megatron's order, in traceable operators.

Host seam (megatron-core 0.19.2): `core/tensor_parallel/layers.py`
`linear_with_grad_accumulation_and_async_allreduce`, `linear_with_frozen_weight`. What they launch
with `async_op=True` becomes a collective of its own, which the engine puts beside the wgrad.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from dynaflow_train.annotate import BACKWARD
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.functions import all_gather, all_reduce, reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Callable


class ParallelLinear(torch.autograd.Function):
    """y = x Wᵀ + b. `kind` says what becomes of x's ranks and of its gradient's.

    - "sum": x [s, b, in] is whole on every rank, its gradient is summed over the group.
    - "gather": x [s / size, b, in] is this rank's part of the sequence; it is gathered, and in the
      backward gathered again if `regather` (the whole x need not be kept); its gradient is summed
      and scattered.
    - "none": neither.
    """

    @staticmethod
    def forward(  # noqa: D102, PLR0913 - autograd takes no structures
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        group: str,
        size: int,
        regather: bool,
    ) -> Tensor:
        ctx.kind, ctx.group, ctx.size = kind, group, size
        ctx.regather = kind == "gather" and regather
        ctx.has_bias, ctx.trains = bias is not None, weight.requires_grad
        whole = all_gather(x, size, group) if kind == "gather" else x
        ctx.save_for_backward(x if ctx.regather else whole, weight)
        out = torch.matmul(whole, weight.t())
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        if ctx.regather and ctx.trains:
            # In another shape than in the forward: else AOTAutograd takes both for one value.
            with annotate({BACKWARD: True}):
                x = all_gather(x.unsqueeze(1), ctx.size, ctx.group)
        of_x = gradient.matmul(weight)
        if ctx.kind == "gather":
            of_x = reduce_scatter(of_x, ctx.size, ctx.group)
        elif ctx.kind == "sum":
            of_x = all_reduce(of_x, ctx.group)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.trains else None
        of_bias = rows.sum(dim=0) if ctx.has_bias else None
        return of_x, of_weight, of_bias, None, None, None, None


def replacement(plain: Callable[..., Tensor], *, regather: bool) -> Callable[..., Tensor]:
    """A function with the signature of the host's `plain`; outside a capture it is `plain`.

    Args:
        plain: one of the host's two linears.
        regather: keep the rank's own part of a gathered input for the backward, as the host does,
            and gather it twice; False keeps all of it and gathers once.
    """

    @functools.wraps(plain)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kw: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return plain(input, weight, bias, *args, **kw)
        return _traced(input, weight, bias, *args, regather=regather, **kw)

    return linear


def _traced(  # noqa: PLR0913 - the host's signature
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Any = None,
    gtp_remat_size: int = 1,
    *,
    regather: bool,
) -> Tensor:
    del wgrad_deferral_limit, gradient_accumulation_fusion  # the engine adds: see `main_grad`
    if grad_output_buffer is not None or gtp_remat_size > 1:
        raise UnsupportedError(
            "a captured layer defers no embedding's wgrad and gathers no rematerialised weights: "
            "no --defer-embedding-wgrad-compute, --gtp-remat-size 1"
        )
    kind = "gather" if sequence_parallel else "sum" if allreduce_dgrad else "none"
    group, size = ("", 1) if kind == "none" else (tp_group.group_name, tp_group.size())
    out: Any = ParallelLinear.apply(input, weight, bias, kind, group, size, regather)
    return out
