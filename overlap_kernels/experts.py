"""Tokens to experts and back, fused with the experts' products: on one rank, or over several.

`dispatch_matmul` brings each token to its experts' ranks and multiplies; `combine_matmul`
multiplies and brings the weighted sum over its experts back. Each is the other's mirror, and so
its dgrad. After Comet (arXiv 2502.19811). Counts stay on the device; a CUDA graph may hold it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import expert_tiles as tiles
from dynaflow_train.overlap_kernels import grouped_matmul as gm


class Shared(Protocol):
    """Memory that the ranks of one host share, as one of them sees it.

    Attributes:
        rank: this one of `world`. buffers: by rank, bytes. tables: int64 [2, world], addresses of
            the buffers, and of int32 flags [world, `flags`' second size] on each rank.
        epochs: int32, on the device: calls so far. state, host: int32 [1], whether a wait was given
            up, and 1 + the rank that did not come. limit: spins before that.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    tables: Tensor
    epochs: Tensor
    state: Tensor
    host: Tensor
    limit: int

    def meet(self) -> None:
        """All ranks, in the current stream."""
        ...


@dataclass(frozen=True)
class Routing:
    """Where tokens go, as one rank sees it. Rows are sorted by expert, then rank, then token.

    Attributes:
        ends: int32 [local experts], the row after each expert's last.
        source: int32 [rows], `rank * tokens + token` of each row; rows: as many as there can be.
        slot: int64 [rows], the place of a row in [world, tokens, top].
        positions: int32 [world, tokens, top], the row here, -1 of an expert that is elsewhere.
    """

    ends: Tensor
    source: Tensor
    slot: Tensor
    positions: Tensor

    @property
    def world(self) -> int:
        """Ranks that share the experts."""
        return self.positions.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of each rank."""
        return self.positions.shape[1]


def route(chosen: Tensor, experts: int, rank: int = 0) -> Routing:
    """The routing of one rank's experts; without a host sync.

    Args:
        chosen: int [world, tokens, top], the experts that all ranks' tokens chose.
        experts: how many each rank has: rank `r` has `r * experts` to `(r + 1) * experts`.
        rank: this one.
    """
    local = chosen.flatten().long() - rank * experts
    mine = (local >= 0) & (local < experts)
    key = torch.where(mine, local, experts)
    slot = torch.argsort(key, stable=True)
    row = torch.empty_like(slot)
    row[slot] = torch.arange(len(slot), device=slot.device)
    each = torch.arange(experts, device=slot.device)
    ends = torch.searchsorted(key[slot], each, right=True).int()
    positions = torch.where(mine, row, -1).int().view(chosen.shape)
    return Routing(ends, (slot // chosen.shape[2]).int(), slot, positions)


@dataclass(frozen=True)
class Split:
    """How a fused kernel's programs are shared out: all of `sms`, and those that move tokens.

    Attributes:
        sms: programs in the grid.
        movers: of them, those that fetch rows or add them up (with other ranks, half for each
            direction).
        tiling: the cut of products beside movers; rows: of gathered rows, without movers; columns:
            of the weights' gradients.
        wide: tiles of columns after which a group's sums can be made.
        block_r: rows that a mover takes at a time; block_c: columns of them that it adds up;
            copied: columns that it copies, enough bytes on their way to fill the link.
    """

    sms: int
    movers: int
    tiling: gm.Tiling
    rows: gm.Tiling
    columns: gm.Tiling
    wide: int
    block_r: int
    block_c: int
    copied: int


def default_split(device: torch.device, dtype: torch.dtype) -> Split:
    """16 movers of a GPU's SMs; small blocks in the interpreter."""
    if gm.interpreted():
        return Split(5, 2, gm.SMALL, gm.SMALL, gm.SMALL, 2, 8, 32, 32)
    sms, three = gm.all_sms(device), (gm.FULL, gm.FULL, gm.FULL)
    if dtype != torch.float32:
        three = gm.HOPPER["forward"][0], gm.HOPPER["forward"][1], gm.HOPPER["wgrad"][0]
    return Split(sms, 16, *three, wide=4, block_r=32, block_c=128, copied=512)


def weight_arguments(weight: Tensor, tiling: gm.Tiling) -> tuple[Any, dict[str, bool]]:
    """A weight as kernels take it: a descriptor if it can have one, and how it lies."""
    k_major = not weight.is_contiguous()
    dense = weight.mT if k_major else weight
    shape = (tiling.block_n, tiling.block_k) if k_major else (tiling.block_k, tiling.block_n)
    described = gm.describe(dense, 1, *shape)
    return described, {"w_tma": described is not dense, "k_major": k_major}


def fetch_and_multiply(
    x: Tensor, weight: Tensor, routing: Routing, space: Shared | None, split: Split
) -> tuple[Tensor, Tensor]:
    """`x[source] @ weight[expert]`, and the rows of x it fetched: x itself on one rank."""
    if space is None:
        y = gm.multiply_rows(x, weight, routing.ends, split.rows, split.sms, routing.source)
        return y, x
    rows, (experts, k, n) = len(routing.source), weight.shape
    staged, y = x.new_empty(rows, k), x.new_empty(rows, n)
    tiling = split.tiling
    gm.hold_context(x.device)
    most = -(-rows // tiling.block_m) + experts
    arrived = torch.zeros(most, dtype=torch.int32, device=x.device)
    space.meet()  # nobody reads the last call's tokens any more
    own = space.buffers[space.rank]
    if x.nbytes > own.numel():
        raise KernelError(f"{list(x.shape)} {x.dtype} needs {x.nbytes} bytes, found {own.numel()}.")
    own[: x.nbytes].view(x.dtype).copy_(x.reshape(-1))
    space.meet()  # everybody's tokens are there
    w, how = weight_arguments(weight, tiling)
    kernel: Any = tiles.dispatch_kernel
    kernel[(split.sms,)](
        space.tables[0], staged, routing.source, w, y, routing.ends, arrived,
        space.state, space.host, space.limit, routing.tokens, k, n, experts, split.movers,
        space.rank, padded=max(128, triton.next_power_of_2(experts)), block_r=split.block_r,
        block_c=split.copied, **how, **shape_options(tiling),
    )  # fmt: skip
    return y, staged


def multiply_and_add(
    x: Tensor,
    weight: Tensor,
    weights: Tensor | None,
    routing: Routing,
    space: Shared | None,
    split: Split,
) -> Tensor:
    """`sum over k of weights[t, k] * (x @ weight)[positions[t, k]]` for this rank's tokens."""
    (world, tokens, top), (experts, k, n) = routing.positions.shape, weight.shape
    tiling = split.tiling
    gm.hold_context(x.device)
    groups = -(-n // (tiling.block_n * split.wide))
    y, out = x.new_empty(x.shape[0], n), x.new_empty(tokens, n)
    counts = torch.zeros((1 + world) * groups, dtype=torch.int32, device=x.device)
    senders, w_how = split.movers, weight_arguments(weight, tiling)
    shared: tuple[Any, ...] = (None, None)
    state, host, limit, rank, flags = counts.new_zeros(1), counts.new_zeros(1), 2**31 - 1, 0, 1
    epoch = counts
    if space is not None:
        need = world * out.nbytes
        if need > space.buffers[space.rank].numel() or groups >= space.flags[0].shape[1]:
            raise KernelError(
                f"combine of {world} times {list(out.shape)} {out.dtype} in {groups} groups needs "
                f"{need} bytes and {groups + 1} flags, found {space.buffers[0].numel()} and "
                f"{space.flags[0].shape[1]}."
            )
        shared, epoch = (space.tables[0], space.tables[1]), space.epochs
        state, host, limit, rank = space.state, space.host, space.limit, space.rank
        flags, senders = space.flags[0].shape[1], split.movers // 2
        space.meet()  # nobody reads the last call's slots any more
    kernel: Any = tiles.combine_kernel
    kernel[(split.sms,)](
        x, w_how[0], y, routing.ends, routing.positions, weights, *shared, out, counts, epoch,
        state, host, limit, tokens, rank, k, n, experts, split.sms - split.movers, senders,
        padded=max(128, triton.next_power_of_2(experts)), weighted=weights is not None, top=top,
        world=world, flags_a_rank=flags, wide=split.wide, block_t=split.block_r,
        block_c=split.block_c, **w_how[1], **shape_options(tiling),
    )  # fmt: skip
    if space is not None:
        space.epochs[:1].add_(1)
    return out


def shape_options(tiling: gm.Tiling) -> dict[str, Any]:
    """A tiling's options, less what these kernels do not have."""
    return {name: value for name, value in tiling.options().items() if name != "flatten"}


class DispatchMatmul(torch.autograd.Function):
    """Tokens to experts, times the first weights; backward by the mirrored kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, routing: Routing, space: Shared | None, split: Split
    ) -> Tensor:
        """Keeps the rows that it fetched."""
        y, kept = fetch_and_multiply(x, weight, routing, space, split)
        ctx.save_for_backward(kept, weight)
        ctx.rest = routing, space, split
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> Any:
        """Products with the transposed weights, summed over each token's experts; wgrad."""
        (kept, weight), (routing, space, split) = ctx.saved_tensors, ctx.rest
        dy, dx, dw = gradients[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = multiply_and_add(dy, weight.mT, None, routing, space, split)
        if ctx.needs_input_grad[1]:
            index = routing.source if space is None else None
            dw = weight_gradient(kept, dy, weight, routing, split, index)
        return dx, dw, None, None, None


class CombineMatmul(torch.autograd.Function):
    """Experts' second products, weighted and summed back at the tokens; backward mirrored."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weights: Tensor,
        routing: Routing,
        space: Shared | None,
        split: Split,
    ) -> Tensor:
        """Keeps its input, not its product."""
        ctx.save_for_backward(x, weight, weights)
        ctx.rest = routing, space, split
        return multiply_and_add(x, weight, weights, routing, space, split)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> Any:
        """Each row's d(out) W^T gives its own gradient and, times its input, its weight's."""
        (x, weight, weights), (routing, space, split) = ctx.saved_tensors, ctx.rest
        dout = gradients[0].contiguous()
        plain, kept = fetch_and_multiply(dout, weight.mT, routing, space, split)
        dx, scaled, dweights = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weights)
        (rows, k), experts, dw = x.shape, len(weight), None
        block_r, block_c = (8, 32) if gm.interpreted() else (8, 256)
        kernel: Any = tiles.scale_kernel
        kernel[(-(-rows // block_r),)](
            plain, x, weights, routing.slot, routing.ends, dx, scaled, dweights, experts, k,
            block_r=block_r, block_c=block_c,
        )  # fmt: skip
        if ctx.needs_input_grad[1]:
            index = routing.source if space is None else None
            dw = weight_gradient(scaled, kept, weight, routing, split, index, second=True)
        return dx, dw, dweights, None, None, None


def weight_gradient(  # noqa: PLR0913
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    routing: Routing,
    split: Split,
    index: Tensor | None,
    second: bool = False,
) -> Tensor:
    """`a_e^T b_e` in the weight's own layout; `index` is of a, or of b if `second`."""
    if index is not None:  # gathering within the kernel took twice the time of the copy
        a, b = (a, b.index_select(0, index)) if second else (a.index_select(0, index), b)
    if weight.is_contiguous():
        return gm.multiply_columns(a, b, routing.ends, split.columns, split.sms)
    return gm.multiply_columns(b, a, routing.ends, split.columns, split.sms).mT


def dispatch_matmul(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    space: Shared | None = None,
    split: Split | None = None,
) -> Tensor:
    """Rows of the local experts times their weights: [rows, N], with gradients.

    Args:
        x: [tokens, K], this rank's tokens, dense.
        weight: [local experts, K, N], dense, K or N contiguous.
        routing: of this rank.
        space: what the ranks share, of at least `x.nbytes`; None on one rank. Within one stream,
            every rank makes the same calls in the same order.
        split: how the kernel's programs are shared out.

    Returns:
        `x[source[r]] @ weight[expert of r]`; rows past `ends[-1]` are not written.

    Raises:
        KernelError: operands that the kernels do not take, or too small a space.
    """
    check(x, weight, routing, space)
    split = split or default_split(x.device, x.dtype)
    return DispatchMatmul.apply(x.contiguous(), weight, routing, space, split)


def combine_matmul(
    x: Tensor,
    weight: Tensor,
    weights: Tensor,
    routing: Routing,
    space: Shared | None = None,
    split: Split | None = None,
) -> Tensor:
    """Experts' products, weighted and summed at the tokens they came from: [tokens, N].

    Args:
        x: [rows, K], sorted as `routing` says.
        weight: [local experts, K, N], dense, K or N contiguous.
        weights: fp32 [world, tokens, top], the router's, of all ranks. Its gradient holds what the
            experts here add; the others' is on their ranks (the adjoint of an all-gather adds up).
        routing: of this rank.
        space: what the ranks share, of at least `world * tokens * N` elements; None on one rank.
        split: how the kernel's programs are shared out.

    Returns:
        Summed in fp32 in the order of k, then in the order of ranks: the same in every run.

    Raises:
        KernelError: operands that the kernels do not take, or too small a space.
    """
    check(x, weight, routing, space)
    if weights.dtype != torch.float32 or weights.shape != routing.positions.shape:
        found = f"{weights.dtype} {list(weights.shape)}"
        raise KernelError(f"weights must be fp32 {list(routing.positions.shape)}, found {found}.")
    split = split or default_split(x.device, x.dtype)
    return CombineMatmul.apply(x.contiguous(), weight, weights.contiguous(), routing, space, split)


def check(x: Tensor, weight: Tensor, routing: Routing, space: Shared | None) -> None:
    """Whether the kernels take it.

    Raises:
        KernelError: no, and why.
    """
    if (why_not := gm.can_run(x, weight, routing.ends)) is not None:
        raise KernelError(f"the experts' kernels cannot run here: {why_not}.")
    if (routing.world > 1) != (space is not None):
        raise KernelError(
            f"routing over {routing.world} ranks {'needs a' if space is None else 'has a'} space "
            f"that they share; pass one if and only if there are several."
        )
