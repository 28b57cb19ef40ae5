"""What the rules call cuttable gives the same on parts of the batch, operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.split.tracing import BATCH, check_all, trace

if TYPE_CHECKING:
    from collections.abc import Callable

aten, prims = torch.ops.aten, torch.ops.prims
SHAPE = (3, 4)  # of a sample; the batch is put in front, between or behind


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Positive random values, no two alike."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def batched(at: int, seed: int = 0) -> Tensor:
    """A batch of `SHAPE`, on dimension `at`."""
    return tensor(*SHAPE[:at], BATCH, *SHAPE[at:], seed=seed)


def bound(function: Callable[[Tensor, int], Any], dim: int) -> Callable[[Tensor], Any]:
    """The function for one dimension."""
    return lambda x: function(x, dim)


# One tensor and a dimension. What works along the batch must run merged; else it must be cut.
ALONG: dict[str, Callable[[Tensor, int], Any]] = {
    "softmax": lambda x, d: aten._softmax(x, d, False),
    "log_softmax": lambda x, d: aten._log_softmax(x, d, False),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "flip": lambda x, d: x.flip(d),
    "rev": lambda x, d: prims.rev(x, [d % 3]),
    "roll": lambda x, d: aten.roll(x, [1], [d]),
    "sort": lambda x, d: x.sort(d).values,
    "argsort": lambda x, d: x.argsort(d),
    "topk": lambda x, d: x.topk(2, d).values,
    "mean": lambda x, d: x.mean(d),
    "mean, kept": lambda x, d: x.mean(d, keepdim=True),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "max": lambda x, d: x.max(d).indices,
    "argmax": lambda x, d: x.argmax(d),
    "prod": lambda x, d: x.prod(d),
    "any": lambda x, d: (x > 0.5).any(d),
    "all": lambda x, d: (x > 0.5).all(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "var": lambda x, d: x.var(d),
    "std": lambda x, d: x.std(d, keepdim=True),
    "var_mean": lambda x, d: torch.var_mean(x, d)[0],
    "norm": lambda x, d: torch.linalg.vector_norm(x, 3, d),
    "select": lambda x, d: x.select(d, 1) * 2,
    "narrow": lambda x, d: x.narrow(d, 1, 2) * 2,
    "step": lambda x, d: aten.slice(x, d, 0, 9, 2) * 2,
    "pad": lambda x, d: aten.constant_pad_nd(x, [*[0, 0] * (2 - d % 3), 1, 2], 7.0),
    "select_scatter": lambda x, d: aten.select_scatter(x, x.select(d, 0) * 2, d, 1),
    "slice_scatter": lambda x, d: aten.slice_scatter(x, x.narrow(d, 0, 1) * 2, d, 1, 2),
    "gather": lambda x, d: x.gather(d, (x * 10).long() % 2),
    "scatter": lambda x, d: torch.zeros_like(x).scatter(d, x.argsort(d), x),
    "scatter_add": lambda x, d: torch.ones_like(x).scatter_add(d, (x * 10).long() % 2, x),
    "renorm by softmax": lambda x, d: aten._softmax_backward_data(x, x.softmax(d), d, x.dtype),
    "unbind": lambda x, d: x.unbind(d)[1] * 2,
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0, 1])),
}
# One tensor and a dimension; cuttable whatever the dimension.
ALWAYS: dict[str, Callable[[Tensor, int], Any]] = {
    "sum": lambda x, d: x.sum(d),
    "sum, kept": lambda x, d: x.sum(d, keepdim=True),
    "unsqueeze": lambda x, d: x.unsqueeze(d) * 2,
    "transpose": lambda x, d: x.transpose(d, 0) * 2,
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "chunk a sum": lambda x, d: sum(torch.cat([x, x * 3], d).chunk(2, d)),
    "flatten front": lambda x, d: x.flatten(0, 1) * 2,
    "flatten and back": lambda x, d: (x.reshape(-1) * 2).view(x.shape),
    "clamp": lambda x, d: x.clamp(0.2, 0.6),
    "where": lambda x, d: torch.where(x > 0.5, x, 0.0),
    "to": lambda x, d: x.to(torch.bfloat16) + x.to(torch.float64),
    "ones": lambda x, d: x + x.new_ones(x.shape) + torch.ones_like(x),
    "gelu": lambda x, d: F.gelu(x) * F.silu(x),
    "expand": lambda x, d: x.unsqueeze(d).expand(*x.shape[: d % 4], 2, *x.shape[d % 4 :]) * 2,
    "squeeze": lambda x, d: x.unsqueeze(d).squeeze(d) * 2,
    "permute": lambda x, d: x.permute(2, 0, 1).contiguous() * 2,
    "norm of all": lambda x, d: x * 2 if d else x.square(),
}
UNARY = [n for n in dir(aten) if not n.startswith("_") and not n.endswith("_")]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ALONG)
def test_along_the_batch_it_is_merged_along_others_cut(name, at):
    for dim in range(-3, 3):
        traced = trace(bound(ALONG[name], dim), [batched(at)], [at])
        check_all(traced)
        merged = "merged" in traced.modes()
        assert merged == (dim % 3 == at), f"dim {dim}: {traced.analysis.reasons}"


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ALWAYS)
def test_what_keeps_samples_apart_is_cut(name, at):
    for dim in range(-3, 3):
        traced = trace(bound(ALWAYS[name], dim), [batched(at)], [at])
        check_all(traced)
        flat = name in ("flatten front", "flatten and back")
        assert set(traced.modes()) <= {"split", "shared"} or flat, traced.analysis.reasons


A, B = tensor(4, 3, seed=1), tensor(5, 4, seed=2)
# Several tensors: function, tensors, their batch dimensions, whether all of it is cut.
PRODUCTS: dict[str, tuple[Callable[..., Any], list[Tensor], list[int | None], bool]] = {
    "rows": (torch.mm, [tensor(BATCH, 4), A], [0, None], True),
    "columns": (torch.mm, [A.T, tensor(4, BATCH)], [None, 1], True),
    "contraction": (torch.mm, [tensor(4, BATCH), tensor(BATCH, 3)], [1, 0], True),
    "gram": (torch.mm, [tensor(BATCH, 4), tensor(4, BATCH)], [0, 1], False),
    "bmm": (torch.bmm, [tensor(BATCH, 3, 4), tensor(BATCH, 4, 2)], [0, 0], True),
    "bmm, rows": (torch.bmm, [tensor(2, BATCH, 4), tensor(2, 4, 3)], [1, None], True),
    "bmm, columns": (torch.bmm, [tensor(2, 3, 4), tensor(2, 4, BATCH)], [None, 2], True),
    "bmm, contraction": (torch.bmm, [tensor(2, 3, BATCH), tensor(2, BATCH, 4)], [2, 1], True),
    "bmm, crossed": (torch.bmm, [tensor(2, BATCH, 4), tensor(2, 4, BATCH)], [1, 2], False),
    "addmm": (torch.addmm, [tensor(3), tensor(BATCH, 4), A], [None, 0, None], True),
    "addmm, batch added": (
        torch.addmm,
        [tensor(BATCH, 3), tensor(BATCH, 4), A],
        [0, 0, None],
        True,
    ),
    "addmm of a sum": (
        torch.addmm,
        [tensor(4, 3), tensor(4, BATCH), tensor(BATCH, 3)],
        [None, 1, 0],
        False,
    ),
    "linear": (F.linear, [tensor(2, BATCH, 4), B], [1, None], True),
    "sum of sums": (lambda x: x.sum(0) + x.mul(2).sum(0), [batched(0)], [0], True),
    "scaled sum": (lambda x, w: x.sum(0) * w, [tensor(BATCH, 4), tensor(4)], [0, None], True),
    "sum of outer": (
        lambda x, w: (x.sum(0) * 2).neg().view(2, 2),
        [tensor(BATCH, 4), A],
        [0, None],
        True,
    ),
    "shifted sum": (lambda x, w: x.sum(0) + w, [tensor(BATCH, 4), tensor(4)], [0, None], False),
    "product of sums": (lambda x: x.sum(0) * x.sum(0), [batched(0)], [0], False),
    "floored sum": (
        lambda x: torch.div(x.sum(0), 3, rounding_mode="floor"),
        [batched(0)],
        [0],
        False,
    ),
    "sum as int": (lambda x: x.sum(0).int(), [batched(0)], [0], False),
    "count as bool": (lambda x: (x > 0.9).sum(0).bool(), [batched(0)], [0], False),
    "count as float": (lambda x: (x > 0.9).sum(0).float() / 2, [batched(0)], [0], True),
    "sum put back": (
        lambda x: x - x.sum(0, keepdim=True).expand(x.shape),
        [batched(0)],
        [0],
        False,
    ),
    "broadcast": (lambda x, m: x * m, [batched(0), tensor(1, 4)], [0, None], True),
    "crossed": (lambda x, y: x[:, None] + y[None], [tensor(BATCH), tensor(BATCH)], [0, 0], False),
    "embedding": (F.embedding, [torch.arange(BATCH) % 5, B], [0, None], True),
    "a table by sample": (
        lambda x, t: x + t[: x.shape[0]],
        [tensor(BATCH, 4), tensor(9, 4)],
        [0, None],
        False,
    ),
    "a table gathered": (
        lambda i, t: t.gather(1, i),
        [torch.arange(2 * BATCH).view(-1, 2) % 4, tensor(9, 4)],
        [0, None],
        False,
    ),
    "rows of a table": (lambda i, t: t[i], [torch.arange(BATCH) % 5, B], [0, None], True),
    "two indices": (
        lambda i, j, t: t[i, j],
        [torch.arange(BATCH) % 5, torch.arange(BATCH) % 4, B],
        [0, 0, None],
        True,
    ),
    "samples by table": (
        lambda x, j: x[:, j],
        [tensor(BATCH, 4), torch.tensor([2, 0])],
        [0, None],
        True,
    ),
    "samples by samples": (
        lambda x, j: x[j],
        [tensor(BATCH, 4), torch.arange(BATCH)],
        [0, 0],
        False,
    ),
    "rows added": (
        lambda i, v: torch.zeros(5, 4).index_put((i,), v, accumulate=True),
        [torch.arange(BATCH) % 3, tensor(BATCH, 4)],
        [0, 0],
        True,
    ),
    "rows written": (
        lambda i, v: torch.zeros(9, 4).index_put((i,), v),
        [torch.arange(BATCH), tensor(BATCH, 4)],
        [0, 0],
        False,
    ),
    "rows added to ones": (
        lambda i, v: torch.ones(5, 4).index_put((i,), v, accumulate=True),
        [torch.arange(BATCH) % 3, tensor(BATCH, 4)],
        [0, 0],
        False,
    ),
    "embedding gradient": (
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, False),
        [tensor(BATCH, 4), torch.arange(BATCH) % 5],
        [0, 0],
        True,
    ),
    "embedding gradient by frequency": (
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True),
        [tensor(BATCH, 4), torch.arange(BATCH) % 5],
        [0, 0],
        False,
    ),
    "attention": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
        [tensor(BATCH, 2, 3, 4), tensor(1, 1, 3, 3)],
        [0, None],
        True,
    ),
    "convolution": (F.conv1d, [tensor(BATCH, 2, 6), tensor(3, 2, 3)], [0, None], True),
    "convolution of weights": (F.conv1d, [tensor(1, 2, 6), tensor(BATCH, 2, 3)], [None, 0], False),
    "convolution gradient": (
        lambda g, x, w: aten.convolution_backward(
            g, x, w, [3], [1], [0], [1], False, [0], 1, [True, True, True]
        ),
        [tensor(BATCH, 3, 4), tensor(BATCH, 2, 6), tensor(3, 2, 3)],
        [0, 0, None],
        True,
    ),
    "max pool": (lambda x: F.max_pool2d(x, 2), [tensor(BATCH, 2, 4, 4)], [0], True),
    "average pool": (lambda x: F.avg_pool2d(x, 2), [tensor(BATCH, 2, 4, 4)], [0], True),
    "group norm": (lambda x: F.group_norm(x, 2), [tensor(BATCH, 4, 3)], [0], True),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [tensor(BATCH, 4)],
        [0],
        False,
    ),
    "layer norm": (lambda x: F.layer_norm(x, (4,)), [batched(1)], [1], True),
    "whole triangle": (
        lambda x: x @ x.T + torch.ones(x.shape[0], x.shape[0]).triu(),
        [tensor(BATCH, 4)],
        [0],
        False,
    ),
    "by number of samples": (lambda x: x / x.shape[0], [batched(0)], [0], True),
    "by place": (lambda x: x * torch.arange(x.shape[0])[:, None], [tensor(BATCH, 4)], [0], False),
    "fft": (lambda x: torch.fft.fft(x, dim=1).real, [tensor(BATCH, 4)], [0], False),
    "mean squares": (lambda x, y: F.mse_loss(x, y), [batched(0), batched(0, 1)], [0, 0], False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_several_tensors(name):
    function, tensors, dims, is_cut = PRODUCTS[name]
    traced = trace(function, tensors, dims)
    check_all(traced)
    assert ("merged" not in traced.modes()) == is_cut, traced.analysis.reasons


def pointwise_operators() -> list[str]:
    """Overloads that torch tags as pointwise and that take one to three tensors only."""
    found = []
    for name in UNARY:
        packet = getattr(aten, name)
        for overload in (
            packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
        ):
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            plain = [a for a in arguments if str(a.type) == "Tensor" and not a.kwarg_only]
            rest = [a for a in arguments if a not in plain and not a.has_default_value()]
            if (
                torch.Tag.pointwise in op.tags
                and plain
                and not rest
                and len(op._schema.returns) == 1
                and overload != "out"
                and torch.Tag.nondeterministic_seeded not in op.tags
            ):
                found.append(f"{name}.{overload}")
    return found


@pytest.mark.parametrize("name", pointwise_operators())
def test_what_torch_calls_pointwise_is(name):
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    number = sum(str(a.type) == "Tensor" and not a.kwarg_only for a in op._schema.arguments)
    inputs = [batched(0, seed) for seed in range(number)]
    try:
        op(*inputs)
    except (RuntimeError, TypeError, NotImplementedError):
        inputs = [(10 * x).long() for x in inputs]
        try:
            op(*inputs)
        except (RuntimeError, TypeError, NotImplementedError):
            inputs = [x > 3 for x in inputs]
            try:
                op(*inputs)
            except (RuntimeError, TypeError, NotImplementedError) as refused:
                pytest.skip(f"takes none of 3 dtypes: {str(refused)[:60]}")
    check_all(trace(op, inputs, [0] * number))
