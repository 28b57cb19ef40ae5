"""The dense kernels as the registry knows them: what they replace, and the ways they may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx

from dynaflow_train.overlap_kernels import all_reduce_rms_norm as arn
from dynaflow_train.overlap_kernels import matching
from dynaflow_train.overlap_kernels.all_gather_matmul import all_gather_matmul
from dynaflow_train.overlap_kernels.matching import SUM
from dynaflow_train.overlap_kernels.matmul_all_reduce import matmul_all_reduce
from dynaflow_train.overlap_kernels.matmul_reduce_scatter import matmul_reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.overlap_kernels.matching import Found, Function
    from dynaflow_train.overlap_kernels.pool import Space

Variants = dict[str, "Function"]
# Fewest first: what is as fast with fewer leaves more to compute. Never all SMs of a GPU: what
# waits for a rank must not keep this one from what that rank waits for.
CTAS = (16, 32, 64, 112)


@dataclass(frozen=True)
class Fused:
    """A kernel that talks to other ranks itself.

    Attributes:
        name: what plans call it.
        find: (graph, device) -> what it replaces, or why not.
        nbytes: of shared memory, for what was found.
        variants: ways to run it, by what they are called, on a space.
    """

    name: str
    find: Callable[[fx.GraphModule, torch.device], Found | str]
    nbytes: Callable[[Found], int]
    variants: Callable[[Found, Space], Variants]


def fused_kernels() -> tuple[Fused, ...]:
    """All of them."""
    return (
        Fused("all_reduce_rms_norm", _find_norm, _sum_bytes, _norms),
        Fused("all_gather_matmul", lambda g, _: matching.find_gather(g), _rows_bytes, _gathers),
        Fused(
            "matmul_reduce_scatter",
            lambda g, _: matching.find_product(g, "reduce_scatter"), _sum_bytes, _scatters,
        ),
        Fused(
            "matmul_all_reduce",
            lambda g, _: matching.find_product(g, "all_reduce"), _sum_bytes, _sums,
        ),
    )  # fmt: skip


def _value(node: fx.Node) -> Tensor:
    return cast("Tensor", node.meta["val"])


def _rows_bytes(found: Found) -> int:
    return _value(found.arguments[0]).nbytes


def _sum_bytes(found: Found) -> int:
    """Of a sum that is the operand, or the product of the first two arguments."""
    first, second = (_value(node) for node in (*found.arguments, found.arguments[0])[:2])
    if found.norm is not None and not found.is_product:
        return first.nbytes
    return first.shape[0] * second.shape[1] * first.element_size()


def _find_norm(graph: fx.GraphModule, device: torch.device) -> Found | str:
    """`matching.find_norm`, if the kernel takes the operand."""
    if why := arn.why_not(device, torch.float32, (1, 1)):
        return why
    found = matching.find_norm(graph, device)
    if isinstance(found, str):
        return found
    operand, last = _value(found.arguments[0]), _value(found.arguments[int(found.is_product)])
    return arn.why_not(device, operand.dtype, (*operand.shape[:-1], last.shape[-1])) or found


def _norms(found: Found, space: Space) -> Variants:
    norm = found.norm
    assert norm is not None, "find_norm always gives one"

    def by(tuning: arn.Tuning) -> Function:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            at = found.parameters
            residual, weight, bias = (None if i is None else given[i].contiguous() for i in at)
            operand = (given[0], given[1]) if found.is_product else given[0].contiguous()
            made = arn.all_reduce_norm(space, operand, residual, (weight, bias), norm, tuning)
            summed = made.total if made.summed is None else made.summed
            return made.total, made.normed, made.means, made.scales, summed

        return run

    keep = SUM in found.results.values()
    made = {
        f"{shots} shot(s), {ctas} CTAs": by(arn.Tuning(shots, ctas, keep_sum=keep))
        for ctas in CTAS
        for shots in (1, 2)
    }
    if space.world == 2:
        copies = {f"copies in {n}": by(arn.Tuning(0, CTAS[-1], n, keep)) for n in (1, 2, 4)}
        made = copies | made
    return made


def _gathers(found: Found, space: Space) -> Variants:
    def by(chunks: int) -> Function:
        def run(*given: Tensor) -> tuple[Tensor, ...]:
            own = given[0].contiguous()
            return all_gather_matmul(space, own.view(-1, own.shape[-1]), given[1], chunks)

        return run

    return {f"{n} chunks": by(n) for n in (1, 2, 4)}


def _scatters(found: Found, space: Space) -> Variants:
    def by(chunks: int) -> Function:
        return lambda *given: (matmul_reduce_scatter(space, given[0], given[1], chunks),)

    return {f"{n} chunks": by(n) for n in (1, 2, 4)}


def _sums(found: Found, space: Space) -> Variants:
    if space.world != 2:
        return {}

    def by(chunks: int) -> Function:
        return lambda *given: (matmul_all_reduce(space, given[0], given[1], chunks),)

    return {f"{n} chunks": by(n) for n in (1, 2, 4, 8)}
