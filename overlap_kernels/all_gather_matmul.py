"""All-gather of rows, then a product with them: parts are multiplied while the next travel.

After Flux (arXiv 2406.06858): copy engines pull the other ranks' rows in chunks, the own rows are
multiplied first. Products stay with cuBLAS. The gathered rows are kept for wgrad. Its dgrad is
`matmul_reduce_scatter`, whose dgrad is this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.pulls import Pulls, rows_of

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.pool import Space

CHUNKS = 2  # of each rank's rows: more make products too small to be fast


def reference(gathered: Tensor, right: Tensor) -> Tensor:
    """In plain torch, of the rows of all ranks."""
    return gathered @ right


def all_gather_matmul(
    space: Space, own: Tensor, right: Tensor, chunks: int = CHUNKS
) -> tuple[Tensor, Tensor]:
    """The product of all ranks' rows with `right`, and the rows.

    Args:
        space: memory for `own`; all ranks call it alike.
        own: this rank's rows [m, k], contiguous; the same m on all ranks, any number.
        right: [k, n], of any strides.
        chunks: parts in which each other rank's rows are pulled.

    Returns:
        [world * m, n] and [world * m, k], in the order of ranks.

    Raises:
        KernelError: shapes do not fit, or a rank did not come before.
    """
    space.check()
    if own.dim() != 2 or right.dim() != 2 or own.shape[1] != right.shape[0]:
        raise KernelError(
            f"kernel {space.kernel!r} multiplies [m, k] by [k, n], not {list(own.shape)} by "
            f"{list(right.shape)}."
        )
    rows, world = own.shape[0], space.world
    gathered = own.new_empty((world * rows, own.shape[1]))
    out = own.new_empty((world * rows, right.shape[1]))
    parts, outs = gathered.view(world, rows, -1), out.view(world, rows, -1)
    lent, pulls = space.view(space.rank, tuple(own.shape), own.dtype), Pulls(space)
    lent.copy_(own)
    pulls.ready()
    order: list[tuple[Tensor, Tensor]] = []
    for peer in space.others:
        theirs = rows_of(space.view(peer, tuple(own.shape), own.dtype), chunks)
        into, made = rows_of(parts[peer], chunks), rows_of(outs[peer], chunks)
        for pulled, source in zip(into, theirs, strict=True):
            pulls.copy([(pulled, source)], meet=not order and pulled is into[0])
        order += zip(into, made, strict=True)
    pulls.end()
    torch.mm(own, right, out=outs[space.rank])
    parts[space.rank].copy_(own)
    for number, (pulled, made) in enumerate(order):
        pulls.wait(number)
        torch.mm(pulled, right, out=made)
    pulls.join()
    return out, gathered


class AllGatherMatmul(torch.autograd.Function):
    """`all_gather_matmul` with gradients, wgrad beside the reduce-scatter of dgrad."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, right: Tensor, space: Space, chunks: int) -> Tensor:
        """Keeps the gathered rows."""
        out, gathered = all_gather_matmul(space, own, right, chunks)
        ctx.save_for_backward(gathered, right)
        ctx.rest = space, chunks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The mirrored kernel, and a product with the gathered rows."""
        from dynaflow_train.overlap_kernels.matmul_reduce_scatter import (  # noqa: PLC0415  # mirror
            matmul_reduce_scatter,
        )

        (gathered, right), (space, chunks) = ctx.saved_tensors, ctx.rest
        of_out = gradients[0].contiguous()
        found: list[Tensor] = []

        def wgrad() -> None:
            found.append(gathered.t() @ of_out)

        of_own = matmul_reduce_scatter(space, of_out, right.t(), chunks, beside=wgrad)
        return of_own, found[0], None, None


def fused(own: Tensor, right: Tensor, space: Space, chunks: int = CHUNKS) -> Tensor:
    """`all_gather_matmul`'s product, differentiable; `space` must hold [world * m, k] too."""
    return AllGatherMatmul.apply(own, right, space, chunks)  # type: ignore[no-any-return]
