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


class GatherFirst(torch.autograd.Function):
    """[n, ...] -> [size * n, ...]; of the gradient, partial on every rank, the own part's sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, group: str) -> Tensor:  # noqa: D102
        ctx.size, ctx.group = size, group
        return all_gather(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return reduce_scatter(gradients[0], ctx.size, ctx.group), None, None


class ScatterFirst(torch.autograd.Function):
    """The reverse: partial sums [size * n, ...] -> the own part's sum [n, ...]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, group: str) -> Tensor:  # noqa: D102
        ctx.size, ctx.group = size, group
        return reduce_scatter(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return all_gather(gradients[0], ctx.size, ctx.group), None, None


class CutFirst(torch.autograd.Function):
    """A tensor that is whole on every rank -> the own part [n, ...]; gradients are joined."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, rank: int, group: str) -> Tensor:  # noqa: D102
        ctx.size, ctx.group = size, group
        return own_part(tensor, size, rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        return all_gather(gradients[0], ctx.size, ctx.group), None, None, None


class JoinFirst(torch.autograd.Function):
    """The reverse: own parts [n, ...] -> whole on every rank, its gradient too; the own part's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, rank: int, group: str) -> Tensor:  # noqa: D102
        ctx.size, ctx.rank = size, rank
        return all_gather(tensor, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        return own_part(gradients[0], ctx.size, ctx.rank), None, None, None


def own_part(tensor: Tensor, size: int, rank: int) -> Tensor:
    """[size * n, ...] -> the rank's [n, ...], in memory of its own."""
    n = tensor.shape[0] // size
    return tensor[rank * n : (rank + 1) * n].clone(memory_format=torch.contiguous_format)


def sum_gradient(tensor: Tensor, group: str) -> Tensor:
    """The tensor itself; its gradient is summed over the group."""
    return SumGradient.apply(tensor, group)  # pyright: ignore[reportReturnType]
