"""A product whose rows are summed over ranks and scattered: parts travel as soon as they are made.

After Flux (arXiv 2406.06858): the other ranks' rows are multiplied first and pulled by them in
chunks; the own rows last, while those travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.all_gather_matmul import CHUNKS, all_gather_matmul
from dynaflow_train.overlap_kernels.pulls import Pulls, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.overlap_kernels.pool import Space


def reference(products: list[Tensor], rank: int) -> Tensor:
    """In plain torch: this rank's rows of the sum of all ranks' products."""
    return torch.stack(products).sum(0).chunk(len(products))[rank]


def matmul_reduce_scatter(
    space: Space,
    left: Tensor,
    right: Tensor,
    chunks: int = CHUNKS,
    beside: Callable[[], None] | None = None,
) -> Tensor:
    """This rank's rows of the sum over ranks of `left @ right`.

    Args:
        space: memory for the product; all ranks call it alike.
        left: [world * m, k].
        right: [k, n].
        chunks: parts in which each rank's rows are made and pulled.
        beside: computes something else while the last parts travel.

    Returns:
        [m, n], summed in fp32 where there are more than two ranks, else rounded once as well.

    Raises:
        KernelError: shapes do not fit, or a rank did not come before.
    """
    space.check()
    world = space.world
    if left.dim() != 2 or right.dim() != 2 or left.shape[0] % world:
        raise KernelError(
            f"kernel {space.kernel!r} scatters the rows of [m, k] @ [k, n] over {world} ranks, m "
            f"divisible by them; found {list(left.shape)} @ {list(right.shape)}."
        )
    rows, columns = left.shape[0] // world, right.shape[1]
    shape = (world, rows, columns)
    seen = [space.view(rank, shape, left.dtype) for rank in range(world)]
    given = left.view(world, rows, -1)
    pulled = left.new_empty(shape)
    pulls, number = Pulls(space), 0
    for chunk in range(chunks):
        for peer in space.others:
            made = rows_of(seen[space.rank][peer], chunks)[chunk]
            torch.mm(rows_of(given[peer], chunks)[chunk], right, out=made)
        pulls.ready()
        pairs = [
            (rows_of(pulled[peer], chunks)[chunk], rows_of(seen[peer][space.rank], chunks)[chunk])
            for peer in space.others
        ]
        pulls.copy(pairs, meet=True)
    pulls.end()
    torch.mm(given[space.rank], right, out=pulled[space.rank])
    if beside is not None:
        beside()
    out = left.new_empty((rows, columns))
    for number, into in enumerate(rows_of(out, chunks)):
        pulls.wait(number)
        parts = [rows_of(each, chunks)[number] for each in pulled]
        if world == 2:
            torch.add(*parts, out=into)
        else:
            torch.sum(torch.stack(parts), 0, out=into)
    pulls.join()
    return out


class MatmulReduceScatter(torch.autograd.Function):
    """`matmul_reduce_scatter` with gradients; the gradient is gathered once for dgrad and wgrad."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, space: Space, chunks: int) -> Tensor:
        """Keeps the factors."""
        ctx.save_for_backward(left, right)
        ctx.rest = space, chunks
        return matmul_reduce_scatter(space, left, right, chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The mirrored kernel, and a product with what it gathered."""
        (left, right), (space, chunks) = ctx.saved_tensors, ctx.rest
        of_left, gathered = all_gather_matmul(space, gradients[0].contiguous(), right.t(), chunks)
        return of_left, left.t() @ gathered, None, None


def fused(left: Tensor, right: Tensor, space: Space, chunks: int = CHUNKS) -> Tensor:
    """`matmul_reduce_scatter`, differentiable."""
    return MatmulReduceScatter.apply(left, right, space, chunks)  # type: ignore[no-any-return]
