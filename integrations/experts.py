"""Dropless expert parallelism on local tensors: tokens to their experts' ranks and back.

Dynamo traces it without a break; every step is an operator of `rows` or of aten, so that the engine
sees the counts' exchange, their way to the host, both all-to-alls and the experts as ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaflow_train.rows import define

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["define", "grouped_linear", "run_experts"]


def run_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Callable[[Tensor, Tensor], Tensor],
    ranks: tuple[str, int],
    local: int,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        hidden: [t, h], this rank's tokens.
        index: [t, k], the experts of each token, counted over all ranks; int64.
        weights: [t, k], what each expert's output counts.
        experts: (rows [n, h] by expert, end of each expert's rows [local], int32) -> [n, h].
        ranks: name and size of the group that shares the experts.
        local: experts on each rank.

    Returns:
        [t, h], in the dtype of `hidden`.
    """
    ops, c10d = torch.ops.dynaflow, torch.ops._c10d_functional
    group, size = ranks
    order, place, counts = ops.sort_pairs(index, size * local)
    rows = ops.sort_rows(hidden.unsqueeze(1).expand(-1, index.shape[1], -1), order, place, index)
    equal = [local] * size
    received = c10d.wait_tensor(c10d.all_to_all_single(counts, equal, equal, group))
    sizes = ops.to_host(counts, received, group)
    rows = ops.exchange_rows(rows, sizes, False, group)
    rows, ends = ops.group_rows(rows, received, size)
    rows = ops.ungroup_rows(experts(rows, ends), received, size)
    rows = ops.exchange_rows(rows, sizes, True, group)
    pairs = ops.unsort_rows(rows, order, place, index)
    return (pairs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def grouped_linear(
    rows: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool, reserve: int = 0
) -> Tensor:
    """Each expert's rows times its weight [out, in], or [in, out] if `transposed`.

    Within autocast in its dtype, as `F.linear`; else in the weight's. `reserve`: SMs that the
    product leaves to collectives (`rows.sms_left`).
    """
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    rows, weight = rows.to(dtype), weight.to(dtype)
    return torch.ops.dynaflow.grouped_mm(rows, weight, ends, transposed, reserve)
