"""All-reduce, residual addition and RMSNorm or LayerNorm in one kernel, without multicast.

After TokenWeave (microsoft/tokenweave), whose kernel needs multicast. Each rank's operand lies in
memory that the others read:

- `shots=1`: every rank pulls all rows, adds, normalises: one meeting, the norm on every rank;
- `shots=2`: every rank reduces and normalises its share of the rows, the others pull the sums;
- `shots=0`, two ranks: copy engines pull, in `chunks`, and the kernel adds and normalises what
  came: no SM waits for the link. Of a product, each part travels while the next is computed.

Sums are taken in fp32 in the order of ranks and rounded once: all ranks hold the same bits. The
backward of a norm is row by row; the all-reduce's own is the identity for a sum of row-parallel
products (Megatron's g), else an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.pool import SLOTS, Space, runs_triton, triton_kernels
from dynaflow_train.overlap_kernels.pulls import Pulls, rows_of

Kind = Literal["none", "rms", "layer"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 32_768  # a row is held in registers
ELEMENTS = 16_384  # of one tile


@dataclass(frozen=True)
class Norm:
    """What follows the addition: nothing, RMSNorm or LayerNorm over the last dimension."""

    kind: Kind = "rms"
    eps: float = 1e-6


@dataclass(frozen=True)
class Tuning:
    """How it runs; every choice gives the same result.

    Attributes:
        shots: see the module. ctas: how many CTAs, at most 255. chunks: parts, for `shots=0`.
        keep_sum: also give the sum without the residual.
    """

    shots: int = 1
    ctas: int = 64
    chunks: int = 4
    keep_sum: bool = False


@dataclass(frozen=True)
class Made:
    """Results: residual + sum and its norm, like the operand; statistics of rows, fp32 [rows].

    `summed` is the sum itself, where it was asked for.
    """

    total: Tensor
    normed: Tensor
    means: Tensor
    scales: Tensor
    summed: Tensor | None = None


def reference(
    reduced: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """In plain torch: (residual + reduced, its norm), where `reduced` is the sum over ranks."""
    total = reduced if residual is None else residual + reduced
    if norm.kind == "rms":
        return total, F.rms_norm(total, total.shape[-1:], weight, norm.eps)
    if norm.kind == "layer":
        return total, F.layer_norm(total, total.shape[-1:], weight, bias, norm.eps)
    return total, total


def why_not(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """None, or why operands of this shape cannot be reduced by the kernel."""
    if not runs_triton(device):
        return f"it needs Triton on CUDA, the operand is on {device}"
    if dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {dtype}"
    if len(shape) < 2 or not 1 <= shape[-1] <= WIDEST:
        return f"it takes rows of 1 to {WIDEST} elements, the operand is {list(shape)}"
    return None


def all_reduce_norm(
    space: Space,
    operand: Tensor | tuple[Tensor, Tensor],
    residual: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None],
    norm: Norm,
    tuning: Tuning,
) -> Made:
    """The sum of all ranks' operands, plus `residual`, and its norm.

    Args:
        space: memory for the operand at least; all ranks call it alike.
        operand: [..., width], contiguous; or two factors [rows, k] and [k, width] of it.
        residual: like the operand, the same on all ranks; or None.
        parameters: weight and bias [width] of the norm, or None.
        norm: what follows.
        tuning: how.

    Raises:
        KernelError: dtype, width or tuning do not fit, or a rank did not come before.
    """
    space.check()
    factors = operand if isinstance(operand, tuple) else None
    given = operand if not isinstance(operand, tuple) else operand[0]
    shape = (*given.shape[:-1], (factors[1] if factors else given).shape[-1])
    reason = why_not(given.device, given.dtype, tuple(shape))
    if reason or not 0 <= tuning.shots <= 2 or (tuning.shots == 0 and space.world != 2):
        reason = reason or f"{tuning} does not fit {space.world} ranks"
        raise KernelError(f"kernel {space.kernel!r} cannot run here: {reason}.")
    own = space.view(space.rank, tuple(shape), given.dtype)
    total = torch.empty_like(own)
    normed = total if norm.kind == "none" else torch.empty_like(own)
    rows = own.numel() // shape[-1]
    means, scales = (torch.empty(rows, dtype=torch.float32, device=own.device) for _ in range(2))
    summed = torch.empty_like(own) if tuning.keep_sum else None
    made = Made(total, normed, means, scales, summed)
    if rows == 0:
        return made
    run = _Launch(space, own, residual, parameters, norm, tuning, made)
    if tuning.shots == 0:
        _copied(run, given, factors)
        return made
    if factors:
        torch.mm(*factors, out=own.view(rows, -1))
    elif given.data_ptr() != own.data_ptr():
        own.copy_(given)
    run(0, rows, own)
    return made


@dataclass(frozen=True)
class _Launch:
    """The kernel with all it is given but the rows."""

    space: Space
    own: Tensor
    residual: Tensor | None
    parameters: tuple[Tensor | None, Tensor | None]
    norm: Norm
    tuning: Tuning
    made: Made

    def __call__(self, begin: int, end: int, pulled: Tensor) -> None:
        width, made, space = self.own.shape[-1], self.made, self.space
        weight, bias = self.parameters
        block, lines, warps = tile(width)
        ctas = max(1, min(self.tuning.ctas, SLOTS - 1, -(-(end - begin) // lines)))
        triton_kernels().all_reduce_norm[(ctas,)](
            space.tables[0], *space.signals(), space.rank, begin, end, self.norm.eps,
            self.own, pulled, _or(self.residual, self.own), _or(weight, self.own),
            _or(bias, self.own), _or(made.summed, self.own), made.total, made.normed, made.means,
            made.scales,
            WIDTH=width, BLOCK=block, ROWS=lines, WORLD=space.world, SLOTS=SLOTS,
            NORM=self.norm.kind, SHOTS=self.tuning.shots, HAS_SUM=made.summed is not None,
            HAS_RESIDUAL=self.residual is not None, HAS_BIAS=bias is not None, num_warps=warps,
        )  # fmt: skip


def _copied(run: _Launch, given: Tensor, factors: tuple[Tensor, Tensor] | None) -> None:
    """Copies, part by part, behind the product where there is one."""
    space, chunks = run.space, run.tuning.chunks
    shape, dtype = tuple(run.own.shape), run.own.dtype
    theirs = space.view(space.others[0], shape, dtype)
    pulled = torch.empty_like(run.own)
    pulls = Pulls(space)
    if factors is None:
        if given.data_ptr() != run.own.data_ptr():
            run.own.copy_(given)
        pulls.ready()
    parts = zip(*(rows_of(each, chunks) for each in (run.own, theirs, pulled)), strict=True)
    lefts = rows_of(factors[0], chunks) if factors else None
    for number, (own, their, into) in enumerate(parts):
        if factors and lefts:
            torch.mm(lefts[number], factors[1], out=own)
            pulls.ready()
        pulls.copy([(into, their)], meet=factors is not None or number == 0)
    pulls.end()
    begin = 0
    for number, part in enumerate(rows_of(pulled, chunks)):
        pulls.wait(number)
        if part.shape[0]:
            run(begin, begin + part.shape[0], pulled)
        begin += part.shape[0]
    pulls.join()


def tile(width: int) -> tuple[int, int, int]:
    """Columns and rows of a tile, and its warps."""
    block = 1 << max(width - 1, 1).bit_length()
    lines = max(1, min(4, ELEMENTS // block))
    return block, lines, min(16, max(4, block * lines // 1024))


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor


def norm_backward(
    made: Made,
    parameters: tuple[Tensor | None, Tensor | None],
    of_normed: Tensor,
    of_total: Tensor | None,
    norm: Norm,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the sum (like it), of weight and of bias (fp32 [width]); row by row."""
    width, (weight, bias) = made.total.shape[-1], parameters
    block, lines, warps = tile(width)
    rows = made.total.numel() // width
    ctas = max(1, min(128, -(-rows // lines)))
    result, device = torch.empty_like(made.total), made.total.device
    shares = torch.empty(2, ctas, width, dtype=torch.float32, device=device)
    triton_kernels().norm_backward[(ctas,)](
        made.total, made.means, made.scales, weight, of_normed, _or(of_total, of_normed), result,
        shares[0], shares[1], rows, WIDTH=width, BLOCK=block, ROWS=lines, NORM=norm.kind,
        HAS_TOTAL=of_total is not None, HAS_BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return result, shares[0].sum(0), shares[1].sum(0) if bias is not None else None


class AllReduceNorm(torch.autograd.Function):
    """`all_reduce_norm` with gradients: see `fused`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        """Of operand, residual, weight, bias, and what does not get gradients."""
        operand, residual, weight, bias, space, norm, tuning, adjoint = given
        made = all_reduce_norm(space, operand, residual, (weight, bias), norm, tuning)
        ctx.rest = space, norm, tuning, adjoint, residual is not None
        ctx.save_for_backward(made.total, made.means, made.scales, weight, bias)
        return made.total, made.normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Row by row, then what the all-reduce's adjoint is."""
        space, norm, tuning, adjoint, has_residual = ctx.rest
        total, means, scales, weight, bias = ctx.saved_tensors
        of_total, of_normed = (each.contiguous() for each in gradients)
        made = Made(total, total, means, scales)
        of_sum, of_weight, of_bias = norm_backward(made, (weight, bias), of_normed, of_total, norm)
        of_operand = of_sum
        if adjoint == "all_reduce":
            nothing = Norm("none")
            of_operand = all_reduce_norm(space, of_sum, None, (None, None), nothing, tuning).total
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        of_residual = of_sum if has_residual else None
        return of_operand, of_residual, of_weight.to(weight.dtype), of_bias, *(None,) * 4


def fused(  # noqa: PLR0913  # what a module calls
    operand: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor, Tensor | None],
    space: Space,
    norm: Norm,
    tuning: Tuning | None = None,
    adjoint: Literal["identity", "all_reduce"] = "identity",
) -> tuple[Tensor, Tensor]:
    """(residual + sum over ranks, its norm), differentiable; arguments as `all_reduce_norm`.

    `adjoint` is the all-reduce's: the identity where what follows is the same on all ranks and each
    has the whole gradient, as after a row-parallel product; else an all-reduce.
    """
    weight, bias = parameters
    rest = (space, norm, tuning or Tuning(), adjoint)
    return AllReduceNorm.apply(operand, residual, weight, bias, *rest)  # type: ignore[no-any-return]
