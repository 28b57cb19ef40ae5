"""Attention, pooling and collectives: operators on blocks, and whether all of it may be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dynaflow_train.rows import define
from tests.split.cases import batched, tensor
from tests.split.operators import SEQUENCE, cut, mixed, numbers, rows, shared
from tests.split.stand_ins import RANKS
from tests.split.tracing import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional
HEADS = [rows(2, 3, 4, seed=i) for i in range(4)]
POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)


def attention(kind: str, *more: Any) -> Callable[..., Any]:
    """Forward and backward of one of torch's attention operators: [b, h, s, d] each."""
    forward = getattr(aten, f"_scaled_dot_product_{kind}").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_backward").default

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *bias: Tensor) -> list[Any]:
        mask = bias[0] if bias else None
        found = forward(q, k, v, *([mask] if "efficient" in kind else []), *more, is_causal=True)
        named = {
            "grad_out": g,
            "grad_out_": g,
            "query": q,
            "key": k,
            "value": v,
            "out": found[0],
            "logsumexp": found[1],
            "attn_bias": mask,
            "max_q": 3,
            "max_k": 3,
            "dropout_p": 0.0,
            "is_causal": True,
            "grad_input_mask": [True, True, True, bias != ()],
        }
        number = torch.zeros((), dtype=torch.long)  # seeds, places: what stands beside
        given = [named.get(a.name, number) for a in backward._schema.arguments if not a.kwarg_only]
        return [*found[:2], *[x for x in backward(*given) if x is not None]]

    return function


def experts(x: Tensor, index: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[t, 4] to the experts `index` [t, 2] and back; and their wgrad by a gradient [t, 3]."""
    ops = define()
    order, place, counts = ops.sort_pairs(index, 3)
    sort = lambda t: ops.sort_rows(t.unsqueeze(1).expand(-1, 2, -1), order, place, index)  # noqa: E731
    left, right, ends = sort(x), sort(gradient), counts.cumsum(0).int()
    wgrad = ops.grouped_wgrad(left, right, ends)
    made = ops.grouped_mm(left.sin(), torch.ones(3, 4, 4).cumsum(0), ends, True)
    return ops.unsort_rows(made, order, place, index).sum(1), wgrad, wgrad * 2


BLOCKS = {
    "attention": cut(F.scaled_dot_product_attention, *HEADS[:3], shared(1, 1, 3, 3)),
    **{
        f"attention, {kind}": cut(attention(kind, *more), *HEADS)
        for kind, more in (
            ("flash_attention", ()),
            ("efficient_attention", (True,)),
            ("cudnn_attention", (None, True)),
        )
    },
    "attention, its bias": cut(attention("efficient_attention", True), *HEADS, shared(1, 2, 3, 3)),
    "attention, gradient on the CPU": cut(
        lambda q, k, g: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, k, *aten._scaled_dot_product_flash_attention_for_cpu(q, k, k), 0.0, False
        ),
        *HEADS[:3],
    ),
    "attention, batch behind": mixed(
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0],
        (tensor(2, BATCH, 3, 4), 1),
    ),
    "max pool": cut(lambda x: F.max_pool2d(x, 2), rows(2, 4, 4)),
    "max pool gradient": cut(
        lambda x, g: aten.max_pool2d_with_indices_backward(
            g, x, *POOL, aten.max_pool2d_with_indices(x, *POOL)[1]
        ),
        rows(2, 4, 4),
        rows(2, 2, 2),
    ),
    "average pool": cut(lambda x: F.avg_pool2d(x, 2), rows(2, 4, 4)),
    "average pool gradient": cut(
        lambda x, g: aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None),
        rows(2, 4, 4),
        rows(2, 2, 2),
    ),
    "adaptive pool": cut(lambda x: aten._adaptive_avg_pool2d(x, [2, 2]), rows(2, 4, 4)),
    "adaptive pool gradient": cut(
        lambda x, g: aten._adaptive_avg_pool2d_backward(g, x), rows(2, 4, 4), rows(2, 2, 2)
    ),
    "small offsets": cut(
        lambda x: prims._low_memory_max_pool_offsets_to_indices(
            prims._low_memory_max_pool_with_offsets(x, *POOL)[1], [2, 2], [4, 4], *POOL[1:4]
        ),
        rows(2, 4, 4),
    ),
    "all-reduce": cut(
        lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "g")) * 2, (batched(1), 1)
    ),
    "all-reduce of a sum": mixed(
        lambda x: c10d.wait_tensor(c10d.all_reduce(x.sum(0), "sum", "g")), rows(4)
    ),
    "broadcast over ranks": cut(lambda x: c10d.broadcast(x, 0, "g"), rows(4)),
    "all-gather": cut(lambda x: c10d.all_gather_into_tensor(x, RANKS, "g"), SEQUENCE),
    "all-gather of samples": cut(
        lambda x: sum(c10d.all_gather_into_tensor(x, RANKS, "g").split(x.shape[0])), rows(4)
    ),
    "reduce-scatter": cut(
        lambda x: c10d.reduce_scatter_tensor(x, "sum", RANKS, "g"), (tensor(4, BATCH, 4), 1)
    ),
    "reduce-scatter of gathered samples": cut(
        lambda x: c10d.reduce_scatter_tensor(torch.cat([x, x]), "sum", RANKS, "g"), rows(4)
    ),
    "reduce-scatter of samples": mixed(
        lambda x: c10d.reduce_scatter_tensor(torch.cat([x] * 3)[: x.shape[0]], "sum", RANKS, "g"),
        (tensor(BATCH, 4), 0),
    ),
    "all-to-all": cut(
        lambda x: c10d.all_to_all_single(x, [2, 2], [2, 2], "g"), (tensor(4, BATCH, 4), 1)
    ),
    "all-to-all of samples": mixed(
        lambda x: c10d.all_to_all_single(x, [3, 3], [3, 3], "g"), rows(4)
    ),
    "rows of experts": cut(experts, rows(4), numbers(3, 2), rows(3, seed=2)),
    "rows of experts, samples behind": cut(
        lambda x, g: experts(
            x.flatten(0, 1), (x.flatten(0, 1)[:, :2] * 7).long() % 3, g.flatten(0, 1)
        ),
        SEQUENCE,
        (tensor(5, BATCH, 3, seed=2), 1),
    ),
    "rows of experts, the same for all tokens": mixed(
        lambda x, i: experts(
            x.flatten(0, 1), i.expand(x.shape[0] * x.shape[1], 2), x.flatten(0, 1)
        ),
        SEQUENCE,
        (torch.tensor([[0, 1]]), None),
    ),
    "rows of experts in an order that nobody knows": mixed(
        lambda x: experts(x, torch.tensor([[0, 1]]).expand(BATCH, 2), x), rows(4)
    ),
}
