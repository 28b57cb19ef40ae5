"""Megatron's f and g as autograd.Functions that Dynamo traces without a break, in any host.

Functional collectives: a launch and a wait, no copy, nothing written in place. Under torch 2.11
they are right only within `correct_gradients()`, which the engine enters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def all_reduce(tensor: Tensor, group: str) -> Tensor:
    """Sum over the group. Functional: Dynamo records two nodes and no copy."""
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(tensor.contiguous(), "sum", group))


def all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """The ranks' tensors one after another, [n, ...] -> [size * n, ...]."""
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(tensor.contiguous(), size, group))


def reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """The sum over the group; each rank keeps its part of the first dimension."""
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(tensor.contiguous(), "sum", size, group))


class SumGradient(torch.autograd.Function):
    """Megatron's f: identity forward, sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:  # noqa: D102
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return all_reduce(gradients[0], ctx.group), None


class SumOutput(torch.autograd.Function):
    """Megatron's g: sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:  # noqa: D102
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return gradients[0], None


_ADJOINT = {"gather": "scatter", "scatter": "gather", "cut": "join", "join": "cut"}


class MoveFirst(torch.autograd.Function):
    """Moves the first dimension between the ranks, and its gradient the other way.

    - "gather": own parts [n, ...] -> whole [size * n, ...]; a rank has a summand of its gradient.
    - "scatter": the reverse, summands [size * n, ...] -> the own part of their sum.
    - "join": own parts -> whole, of which each rank has the whole gradient.
    - "cut": the reverse, what is whole on every rank -> the own part.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, kind: str, group: str, size: int, rank: int
    ) -> Tensor:
        ctx.kind, ctx.ranks = kind, (group, size, rank)
        return _moved(tensor, kind, group, size, rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        return _moved(gradients[0], _ADJOINT[ctx.kind], *ctx.ranks), None, None, None, None


def _moved(tensor: Tensor, kind: str, group: str, size: int, rank: int) -> Tensor:
    if kind == "scatter":
        return reduce_scatter(tensor, size, group)
    if kind != "cut":
        return all_gather(tensor, size, group)
    n = tensor.shape[0] // size
    return tensor[rank * n : (rank + 1) * n].clone(memory_format=torch.contiguous_format)


def sum_gradient(tensor: Tensor, group: str) -> Tensor:
    """The tensor itself; its gradient is summed over the group."""
    return SumGradient.apply(tensor, group)  # pyright: ignore[reportReturnType]
