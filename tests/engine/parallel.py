"""Tensor- and sequence-parallel layers for the engine's tests, cut out of an unsharded one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)

from tests.engine.modules import Block
from tests.engine.zoo import Case, rows, second

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LENGTH = 8, 6


def _all_reduce(x: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group))


class SumGradient(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _all_reduce(gradient)


class SumOutput(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx, x):
        return _all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def gathered(x: Tensor, dim: int) -> Tensor:
    """All ranks' parts joined along `dim`; the gradient is summed and scattered."""
    return all_gather_tensor_autograd(x, dim, dist.group.WORLD)


def scattered(x: Tensor, dim: int) -> Tensor:
    """The sum over ranks, cut along `dim`."""
    return reduce_scatter_tensor_autograd(x, "sum", dim, dist.group.WORLD)


class ParallelBlock(nn.Module):
    """`Block` over all ranks: `style` "fg" sums partial outputs, "sp" gathers and scatters.

    "fg" works on [b, s, h], "sp" on [s, b, h] with this rank's share of the sequence.
    """

    def __init__(self, block: Block, style: str) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.style, self.heads = style, block.heads // world
        self.norm1, self.norm2 = block.norm1, block.norm2

        def rows_of(weight: Tensor, parts: int = 1) -> nn.Parameter:
            pieces = [p.chunk(world)[rank] for p in weight.detach().chunk(parts)]
            return nn.Parameter(torch.cat(pieces).clone())

        def columns_of(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().chunk(world, 1)[rank].clone())

        self.qkv, self.qkv_bias = rows_of(block.qkv.weight, 3), rows_of(block.qkv.bias, 3)
        self.out, self.out_bias = columns_of(block.out.weight), block.out.bias
        self.up, self.up_bias = rows_of(block.mlp[0].weight), rows_of(block.mlp[0].bias)
        self.down, self.down_bias = columns_of(block.mlp[2].weight), block.mlp[2].bias

    def enter(self, x: Tensor) -> Tensor:
        return SumGradient.apply(x) if self.style == "fg" else gathered(x, 0)

    def leave(self, x: Tensor) -> Tensor:
        return SumOutput.apply(x) if self.style == "fg" else scattered(x, 0)

    def self_attn(self, x: Tensor) -> Tensor:
        """In "sp" the linears work on [s, b, h]: their gradients are contiguous, as 2.11 needs."""
        split = F.linear(x, self.qkv, self.qkv_bias).unflatten(-1, (3, self.heads, -1))
        sbh = self.style == "sp"
        q, k, v = split.permute((2, 1, 3, 0, 4) if sbh else (2, 0, 3, 1, 4))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.permute((2, 0, 1, 3) if sbh else (0, 2, 1, 3)).flatten(2)
        return F.linear(y, self.out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.self_attn(self.enter(self.norm1(x)))
        x = x + self.leave(y) + self.out_bias
        y = F.linear(self.enter(self.norm2(x)), self.up, self.up_bias)
        return x + self.leave(F.linear(F.gelu(y), self.down)) + self.down_bias


class Stack(nn.Module):
    """Layers in a ModuleList: a "model" region of all, or "layer" regions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class GatheredHead(nn.Module):
    """A column-parallel head whose outputs are gathered on the last dimension."""

    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full.weight.detach().chunk(world)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(gathered(F.linear(SumGradient.apply(x), self.weight), -1))


class GatheredRows(nn.Module):
    """The samples of all ranks joined, worked on, and every rank's own taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return scattered(torch.tanh(self.lin(gathered(x, 0))), 0) * x


class SharedNorm(nn.Module):
    """A replicated parameter whose gradient is summed over the ranks inside the region."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.lin = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * SumGradient.apply(self.weight))


def blocks(style: str, depth: int = 2) -> Stack:
    """A stack of parallel layers."""
    return Stack(*(ParallelBlock(Block(), style) for _ in range(depth)))


def own(make: Callable[[int], tuple[Tensor, ...]]) -> Callable[[int], tuple[Tensor, ...]]:
    """Other inputs on every rank."""
    return lambda b: tuple(x * (1 + dist.get_rank()) for x in make(b))


PARALLEL: dict[str, Case] = {
    "fg": Case(lambda: blocks("fg"), rows(LENGTH, WIDTH)),
    "sp": Case(lambda: blocks("sp"), own(second(LENGTH // 2, WIDTH)), batch_dim=1),
    "gathered_head": Case(lambda: GatheredHead(nn.Linear(WIDTH, 6)), rows(LENGTH, WIDTH)),
    "gathered_rows": Case(GatheredRows, own(rows(WIDTH))),
    "shared_norm": Case(SharedNorm, own(rows(WIDTH))),
}
