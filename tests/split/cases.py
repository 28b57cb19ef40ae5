"""Operators of one tensor and a dimension, and what the split stage must say of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.split.tracing import BATCH

aten, prims = torch.ops.aten, torch.ops.prims
SHAPE = (3, 4)  # of a sample; the batch is put in front, between or behind
OneDim = Callable[[Tensor, int], Any]


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Positive random values, no two alike."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def batched(at: int, seed: int = 0) -> Tensor:
    """A batch of `SHAPE`, on dimension `at`."""
    return tensor(*SHAPE[:at], BATCH, *SHAPE[at:], seed=seed)


# (dimension of the batch, dimension given to the operator, from one end or the other)
DIMENSIONS = ((0, 0), (1, 0), (1, -2), (1, 2), (2, -1))
THREE = ((0, -1), (1, 0), (2, 2))  # behind the batch, before it, along it


def dimensions(function: OneDim, given: tuple[tuple[int, int], ...]) -> Callable[..., list[Any]]:
    """Apply to batches on some dimension, along some."""
    return lambda *xs: [function(xs[at], dim) for at, dim in given if at < len(xs)]


# What works along the batch must run merged; along another dimension it must be cut.
ALONG: dict[str, OneDim] = {
    "softmax": lambda x, d: aten._softmax(x, d, False),
    "log_softmax": lambda x, d: aten._log_softmax(x, d, False),
    "softmax backward": lambda x, d: aten._softmax_backward_data(x, x * 2, d, x.dtype),
    "log_softmax backward": lambda x, d: aten._log_softmax_backward_data(x, x.neg(), d, x.dtype),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "flip": lambda x, d: x.flip(d),
    "rev": lambda x, d: prims.rev(x, [d % 3]),
    "roll": lambda x, d: aten.roll(x, [1], [d]),
    "sort": lambda x, d: x.sort(d).values,
    "sort, stable": lambda x, d: aten.sort.stable(x, stable=True, dim=d, descending=True)[1],
    "argsort": lambda x, d: x.argsort(d),
    "topk": lambda x, d: x.topk(2, d).values,
    "topk's places": lambda x, d: aten.topk(x, 2, d, False, False)[1],
    "mean": lambda x, d: x.mean(d),
    "mean, kept": lambda x, d: x.mean(d, keepdim=True),
    "mean of two": lambda x, d: x.mean((d, (d + 1) % 3)),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "max": lambda x, d: x.max(d).indices,
    "min": lambda x, d: x.min(d, keepdim=True).values,
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "prod": lambda x, d: x.prod(d),
    "any": lambda x, d: (x > 0.5).any(d),
    "all": lambda x, d: (x > 0.5).all(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "var": lambda x, d: x.var(d),
    "std": lambda x, d: x.std(d, keepdim=True),
    "var_mean": lambda x, d: torch.var_mean(x, d, keepdim=True)[0],
    "norm": lambda x, d: torch.linalg.vector_norm(x, 3, d),
    "select": lambda x, d: x.select(d, 1) * 2,
    "narrow": lambda x, d: x.narrow(d, 1, 2) * 2,
    "step": lambda x, d: aten.slice(x, d, 0, 9, 2) * 2,
    "last": lambda x, d: aten.slice(x, d, -1) * 2,
    "select_scatter": lambda x, d: aten.select_scatter(x, x.select(d, 0) * 2, d, 1),
    "slice_scatter": lambda x, d: aten.slice_scatter(x, x.narrow(d, 0, 1) * 2, d, 1, 2),
    "gather": lambda x, d: x.gather(d, (x * 10).long() % 2),
    "scatter": lambda x, d: torch.zeros_like(x).scatter(d, x.argsort(d), x),
    "scatter a number": lambda x, d: torch.zeros_like(x).scatter(d, x.argsort(d), 2.0),
    "scatter_add": lambda x, d: torch.ones_like(x).scatter_add(d, (x * 10).long() % 2, x),
    "scatter_reduce": lambda x, d: x.scatter_reduce(d, (x * 10).long() % 2, x * 2, "amax"),
    "pad": lambda x, d: aten.constant_pad_nd(x, [0, 0] * (2 - d % 3) + [1, 0], 0.5),
    "crop": lambda x, d: aten.constant_pad_nd(x, [0, 0] * (2 - d % 3) + [0, -1], 0.0),
    "index": lambda x, d: x.index_select(d, torch.tensor([0, 2])),
    "index_put": lambda x, d: x.index_copy(d, torch.tensor([2, 1]), x.narrow(d, 0, 2)),
    "index_put, added": lambda x, d: x.index_add(d, torch.tensor([1, 1]), x.narrow(d, 0, 2)),
}
# Cut whatever the dimension.
ALWAYS: dict[str, OneDim] = {
    "sum": lambda x, d: x.sum(d),
    "sum, kept": lambda x, d: x.sum(d, keepdim=True),
    "sum of all": lambda x, d: (x * d).sum(),
    "unsqueeze": lambda x, d: x.unsqueeze(d) * 2,
    "squeeze": lambda x, d: x.unsqueeze(d).squeeze(d) * 2,
    "transpose": lambda x, d: x.transpose(d, 0) * 2,
    "permute": lambda x, d: x.permute(2, 0, 1).contiguous() * d,
    "t": lambda x, d: x.sum(d).t() * 2,
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "split": lambda x, d: sum(torch.cat([x, x * 3], d).chunk(2, d)),
    "split_with_sizes": lambda x, d: torch.cat([x, x * 3], d).split([x.shape[d]] * 2, d)[1] * 2,
    "slices": lambda x, d: torch.cat([x, x * 3], d).narrow(d, x.shape[d], x.shape[d]) * 2,
    "repeat": lambda x, d: x.repeat(*(2, 1, 3)[d % 3 :], *(2, 1, 3)[: d % 3]) * 2,
    "repeat in front": lambda x, d: x.repeat(2, 1, 1, 1 + d % 3) * 2,
    "expand": lambda x, d: x.unsqueeze(d).expand(*_wider(x, d)) * 2,
    "clamp": lambda x, d: x.clamp(0.2, 0.6) * d,
    "where": lambda x, d: torch.where(x > 0.5, x, 0.0 + d),
    "masked_fill": lambda x, d: x.masked_fill(x > 0.5, torch.tensor(1.0 + d)),
    "to": lambda x, d: x.to(torch.bfloat16) + x.to(torch.float64) * d,
    "clone": lambda x, d: x.clone() * d,
    "gelu": lambda x, d: F.gelu(x) * F.silu(x) * d,
    "alias": lambda x, d: aten.alias(aten.detach(x)) * d,
    "bits": lambda x, d: x.view(torch.int32) + d,
    "new ones": lambda x, d: x + x.new_ones(x.shape) + torch.ones_like(x) * d,
    "new zeros": lambda x, d: x.new_zeros(x.shape) + torch.zeros_like(x) - x * d,
    "zeros": lambda x, d: (
        torch.ones(x.shape) * d + torch.zeros(x.shape) + torch.full(x.shape, 2) + x
    ),
    "full_like": lambda x, d: torch.full_like(x, 3) * d,
    "written": lambda x, d: aten.copy(torch.empty_like(x), x) * d,
    "empty": lambda x, d: [torch.empty(x.shape), x.new_empty(x.shape), x + d],
    "empty, strided": lambda x, d: [
        aten.empty_strided(x.shape, x.stride()),
        aten.new_empty_strided(x, x.shape, x.stride()),
        x + d,
    ],
    "drawn": lambda x, d: [torch.rand(x.shape), torch.randn(x.shape), x * d],
    "drawn alike": lambda x, d: [
        torch.rand_like(x),
        torch.randn_like(x),
        (x / 2).bernoulli(),
        x * d,
    ],
    "dropout": lambda x, d: aten.native_dropout(x, 0.5, True)[0] * d,
    "dropout backward": lambda x, d: aten.native_dropout_backward(x, x > 0.5, 2.0) * d,
    "complex": lambda x, d: torch.view_as_real(torch.polar(x, x) * d),
    "real": lambda x, d: torch.view_as_complex(torch.stack([x, x * d], -1)).conj() * 2,
    "column indices": lambda x, d: x.unsqueeze(0)[torch.tensor([0, 0])] * d,
}
FLAT: dict[str, OneDim] = {  # the batch first: rows of tokens
    "flat": lambda x, d: x.flatten(0, 1) * d,
    "flat and back": lambda x, d: (x.reshape(-1) * d).view(x.shape),
    "unsafe view": lambda x, d: aten._unsafe_view(x, [-1, 4]).softmax(-1) * d,
    "strided view": lambda x, d: torch.as_strided(x, [x.shape[0] * 3, 4], [4, 1]) * d,
}


def _wider(x: Tensor, dim: int) -> list[int]:
    return [*x.shape[: dim % 4], 2, *x.shape[dim % 4 :]]
