"""What operators compute that need several processes or a GPU: the same in plain torch.

Collectives: two ranks, this one and one that holds twice the same values.
Attention: the sums written out; gradients by autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RANKS = 2


def all_reduce(tensor: Tensor, *_: Any) -> Tensor:
    return tensor * 3


def broadcast(tensor: Tensor, *_: Any) -> Tensor:
    return tensor * 2


def all_gather(tensor: Tensor, *_: Any) -> Tensor:
    return torch.cat([tensor, tensor * 2])


def reduce_scatter(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.chunk(RANKS)[0] * 3


def all_to_all(tensor: Tensor, *_: Any) -> Tensor:
    mine = tensor.chunk(RANKS)[0]
    return torch.cat([mine, mine * 2])


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name.rstrip("_") for a in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _sums(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """[b, h, s, d] each -> the result, and the logarithm of each query's sum [b, h, s]."""
    scale = given.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * scale
    bias = given.get("attn_bias", given.get("attn_mask"))
    if bias is not None:
        scores = scores + bias
    if given.get("is_causal"):
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    return [scores.softmax(-1) @ value, scores.logsumexp(-1)]


def attention(operator: Any) -> Any:
    """The operator, forward or backward; of what it returns beside, zeros."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = _named(operator, args, kwargs)
        found = _sums(given["query"], given["key"], given["value"], given)
        scalars = [torch.zeros(()) for _ in operator._schema.returns[2:]]
        return (*found, *scalars)

    def backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = _named(operator, args, kwargs)
        inputs = [given[n] for n in ("query", "key", "value", "attn_bias") if n in given]
        inputs = [x.detach().requires_grad_() for x in inputs if x is not None]
        given["attn_bias"] = inputs[3] if len(inputs) > 3 else None
        result = _sums(*inputs[:3], given)[0]
        found = torch.autograd.grad(result, inputs, given["grad_out"])
        return (*found, *[None] * (len(operator._schema.returns) - len(found)))

    return backward if operator._schema.name.endswith("_backward") else forward


STAND_INS = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": all_to_all,
    "wait_tensor": lambda tensor: tensor,
} | {
    f"_scaled_dot_product_{kind}_attention{phase}": attention(
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{phase}").default
    )
    for kind in ("flash", "efficient", "cudnn")
    for phase in ("", "_backward")
}
