"""A product that is summed over two ranks: each part is pulled while the next is made.

For tensor parallelism without sequence parallelism. Of more ranks each would pull all the others'
products: a reduce-scatter and an all-gather are better there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.pulls import Pulls, rows_of

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.pool import Space

CHUNKS = 4


def reference(products: list[Tensor]) -> Tensor:
    """In plain torch, of all ranks' products."""
    return torch.stack(products).sum(0)


def matmul_all_reduce(space: Space, left: Tensor, right: Tensor, chunks: int = CHUNKS) -> Tensor:
    """The sum over two ranks of `left @ right`, [m, k] by [k, n].

    Raises:
        KernelError: not two ranks, shapes do not fit, or a rank did not come before.
    """
    space.check()
    if space.world != 2 or left.dim() != 2 or right.dim() != 2:
        raise KernelError(
            f"kernel {space.kernel!r} sums matrices of 2 ranks; found {space.world} and "
            f"{list(left.shape)} @ {list(right.shape)}."
        )
    shape = (left.shape[0], right.shape[1])
    mine, theirs = (
        rows_of(space.view(rank, shape, left.dtype), chunks)
        for rank in (space.rank, space.others[0])
    )
    out, pulls = left.new_empty(shape), Pulls(space)
    outs = rows_of(out, chunks)
    for number, rows in enumerate(left.tensor_split(chunks)):
        torch.mm(rows, right, out=mine[number])
        pulls.ready()
        pulls.copy([(outs[number], theirs[number])], meet=True)
    pulls.end()
    for number, into in enumerate(outs):
        pulls.wait(number)
        into.add_(mine[number])
    pulls.join()
    return out


class MatmulAllReduce(torch.autograd.Function):
    """`matmul_all_reduce` with gradients: the all-reduce's is the identity (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, space: Space, chunks: int) -> Tensor:
        """Keeps the factors."""
        ctx.save_for_backward(left, right)
        return matmul_all_reduce(space, left, right, chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Two products; nothing travels."""
        left, right = ctx.saved_tensors
        return gradients[0] @ right.t(), left.t() @ gradients[0], None, None


def fused(left: Tensor, right: Tensor, space: Space, chunks: int = CHUNKS) -> Tensor:
    """`matmul_all_reduce`, differentiable."""
    return MatmulAllReduce.apply(left, right, space, chunks)  # type: ignore[no-any-return]
