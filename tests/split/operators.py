"""Operators of several tensors, and whether all of it may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.split.cases import batched, tensor
from tests.split.tracing import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A function, its tensors, where each carries the batch, and the verdict."""

    function: Callable[..., Any]
    tensors: list[Tensor]
    batch_dims: list[int | None]
    is_cut: bool = True


def cut(function: Callable[..., Any], *tensors: tuple[Tensor, int | None], **more: Any) -> Case:
    """All of it is cut."""
    return Case(function, [t for t, _ in tensors], [d for _, d in tensors], **more)


def mixed(function: Callable[..., Any], *tensors: tuple[Tensor, int | None], **more: Any) -> Case:
    """Some of it is merged."""
    return cut(function, *tensors, is_cut=False, **more)


def rows(*sample: int, seed: int = 0) -> tuple[Tensor, int]:
    """A batch in front."""
    return tensor(BATCH, *sample, seed=seed), 0


def shared(*shape: int, seed: int = 1) -> tuple[Tensor, None]:
    """The same for all samples."""
    return tensor(*shape, seed=seed), None


def numbers(below: int, *sample: int) -> tuple[Tensor, int]:
    """Indices of each sample."""
    return (torch.arange(BATCH * max(1, *sample, 1)).view(BATCH, *sample) * 5 + 1) % below, 0


SEQUENCE = (tensor(5, BATCH, 4), 1)  # [s, b, h]
CHOSEN = (torch.tensor([2, 0]), None)

PRODUCTS = {
    "rows": cut(torch.mm, rows(4), shared(4, 3)),
    "columns": cut(torch.mm, shared(3, 4), (tensor(4, BATCH), 1)),
    "contraction": cut(torch.mm, (tensor(4, BATCH), 1), rows(3)),
    "gram": mixed(torch.mm, rows(4), (tensor(4, BATCH), 1)),
    "bmm": cut(torch.bmm, rows(3, 4), rows(4, 2)),
    "bmm, rows": cut(torch.bmm, (tensor(2, BATCH, 4), 1), shared(2, 4, 3)),
    "bmm, columns": cut(torch.bmm, shared(2, 3, 4), (tensor(2, 4, BATCH), 2)),
    "bmm, contraction": cut(torch.bmm, (tensor(2, 3, BATCH), 2), (tensor(2, BATCH, 4), 1)),
    "bmm, crossed": mixed(torch.bmm, (tensor(2, BATCH, 4), 1), (tensor(2, 4, BATCH), 2)),
    "bmm of two orders": mixed(
        lambda x, y: x.flatten(0, 1).bmm(y.flatten(0, 1)),
        (tensor(2, BATCH, 3, 4), 1),
        (tensor(BATCH, 2, 4, 3), 0),
    ),
    "contraction of two orders": mixed(
        lambda x, y: x.flatten(0, 1).t().mm(y.flatten(0, 1)), SEQUENCE, rows(5, 3)
    ),
    "addmm": cut(torch.addmm, shared(3), rows(4), shared(4, 3)),
    "addmm, batch added": cut(torch.addmm, rows(3), rows(4), shared(4, 3)),
    "addmm of a sum": mixed(torch.addmm, shared(4, 3), (tensor(4, BATCH), 1), rows(3)),
    "baddbmm": cut(torch.baddbmm, shared(1, 3, 2), rows(3, 4), rows(4, 2)),
    "linear": cut(F.linear, (tensor(2, BATCH, 4), 1), shared(5, 4)),
    "triangular": cut(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), rows(3, 3), rows(3, 2)
    ),
    "triangular, of samples": mixed(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        shared(3, 3),
        (tensor(3, BATCH), 1),
    ),
    "convolution": cut(F.conv1d, rows(2, 6), shared(3, 2, 3), shared(3)),
    "convolution of weights": mixed(F.conv1d, shared(1, 2, 6), rows(2, 3)),
    "convolution along the batch": mixed(
        lambda x, w: F.conv1d(x.unsqueeze(0), w), (tensor(2, BATCH), 1), shared(3, 2, 3)
    ),
    "transposed convolution": cut(F.conv_transpose1d, rows(2, 6), shared(2, 3, 3)),
    **{
        f"convolution gradient {mask}": cut(
            lambda g, x, w, mask=mask: aten.convolution_backward(
                g, x, w, [3], [1], [0], [1], False, [0], 1, mask
            ),
            rows(3, 4),
            rows(2, 6),
            shared(3, 2, 3),
        )
        for mask in ([True, True, True], [False, True, False])
    },
    "convolution gradient of weights": mixed(
        lambda g, x, w: aten.convolution_backward(
            g, x, w, None, [1], [0], [1], False, [0], 1, [True, True, False]
        ),
        (tensor(1, BATCH, 4), 1),
        shared(1, 2, 6),
        rows(2, 3),
    ),
}
SUMS = {
    "sum of sums": cut(lambda x: x.sum(0) + x.mul(2).sum(0), (batched(0), 0)),
    "difference of sums": cut(lambda x: x.sum(1) - x.mul(2).sum(1), (batched(1), 1)),
    "scaled sum": cut(lambda x, w: w * x.sum(0) * w / 3, rows(4), shared(4)),
    "views of a sum": cut(lambda x: (x.sum(0) * 2).neg().view(2, 2).t()[:, 1], rows(4)),
    "sum of a sum": cut(lambda x: x.sum(0).sum(0, keepdim=True).expand(3, 4), (batched(0), 0)),
    "shifted sum": mixed(lambda x, w: x.sum(0) + w, rows(4), shared(4)),
    "product of sums": mixed(lambda x: x.sum(0) * x.sum(0), rows(4)),
    "inverse of a sum": mixed(lambda x, w: w / x.sum(0), rows(4), shared(4)),
    "floored sum": mixed(lambda x: torch.div(x.sum(0), 3, rounding_mode="floor"), rows(4)),
    "sum as int": mixed(lambda x: x.sum(0).int(), rows(4)),
    "count as bool": mixed(lambda x: (x > 0.9).sum(0).bool(), rows(4)),
    "count as float": cut(lambda x: (x > 0.9).sum(0).float() / 2, rows(4)),
    "sum put back": mixed(lambda x: x - x.sum(0, keepdim=True).expand(x.shape), rows(4)),
    "sum as weight": mixed(lambda x: x @ x.sum(0)[:, None], rows(4)),
    "by number of samples": cut(lambda x: [x / x.shape[0], x.sum(0) / x.shape[0]], rows(4)),
    "mean squares": mixed(F.mse_loss, rows(3, 4), rows(3, 4, seed=1)),
}
PLACES = {
    "broadcast": cut(lambda x, m: x * m, rows(3, 4), shared(1, 4)),
    "crossed": mixed(lambda x, y: x[:, None] + y[None], rows(), rows()),
    "two orders": mixed(lambda x, y: x.flatten(0, 1) + y.flatten(0, 1), SEQUENCE, rows(5, 4)),
    "joined in two orders": mixed(
        lambda x, y: torch.cat([x.flatten(0, 1), y.flatten(0, 1)], 1), SEQUENCE, rows(5, 4)
    ),
    "joined with what is shared": mixed(lambda x, y: torch.cat([x, y]), rows(4), shared(2, 4)),
    "zeros in the order beside them": cut(
        lambda x: torch.cat(
            [
                torch.zeros(x.shape[0] * x.shape[1], 4).scatter(1, x.flatten(0, 1).argsort(1), 1.0),
                torch.ones(x.shape[0] * x.shape[1], 1) * x.flatten(0, 1),
            ],
            1,
        ),
        SEQUENCE,
    ),
    "one for all in the order beside it": cut(
        lambda x, w: x.flatten(0, 1) * w.expand(x.shape[0] * x.shape[1], 4), SEQUENCE, shared(1, 4)
    ),
    "computed of one for all, in the order beside it": cut(
        lambda x, w: x.flatten(0, 1) + (w.expand(x.shape[0] * x.shape[1], 4) * 2).sin(),
        SEQUENCE,
        shared(1, 4),
    ),
    "ones as what is in no order": cut(
        lambda x: x.flatten(0, 1) * torch.ones_like(torch.zeros(x.shape[0] * x.shape[1], 4)),
        SEQUENCE,
    ),
    "ones as what is in another order": cut(
        lambda x, y: x.flatten(0, 1) * torch.ones_like(y.flatten(0, 1)), SEQUENCE, rows(5, 4)
    ),
    "a sum beside each sample": mixed(
        lambda x: x.flatten(0, 1) * x.sum((0, 1)).expand(x.shape[0] * x.shape[1], 4), SEQUENCE
    ),
    "draws by one for all keep their order": mixed(
        lambda x, w: x.flatten(0, 1) * torch.bernoulli(w.expand(x.shape[0] * x.shape[1], 4) * 0.5),
        SEQUENCE,
        shared(1, 4),
    ),
    "dropout of one for all keeps its order": mixed(
        lambda x, w: (
            x.flatten(0, 1)
            * aten.native_dropout(w.expand(x.shape[0] * x.shape[1], 4), 0.5, True)[0]
        ),
        SEQUENCE,
        shared(1, 4),
    ),
    "written to zeros, in the order of what is written": mixed(
        lambda x, y, j: (
            aten.index_put(
                torch.zeros(x.shape[0] * x.shape[1], 4), [None, j], x.flatten(0, 1)[:, :2]
            )
            * y.flatten(0, 1)
        ),
        SEQUENCE,
        rows(5, 4),
        CHOSEN,
    ),
    "written to zeros beside what is written": cut(
        lambda x, j: (
            aten.index_put(
                torch.zeros(x.shape[0] * x.shape[1], 4), [None, j], x.flatten(0, 1)[:, :2]
            )
            * x.flatten(0, 1)
        ),
        SEQUENCE,
        CHOSEN,
    ),
    "draws keep their order": mixed(
        lambda x: x.flatten(0, 1) * torch.rand(x.shape[0] * x.shape[1], 4), SEQUENCE
    ),
    "a table by sample": mixed(lambda x, t: x + t[: x.shape[0]], rows(4), shared(9, 4)),
    "some samples": mixed(lambda x: x[: x.shape[0] - 1] * 2, rows(4)),
    "bounds by number of samples": mixed(
        lambda x: aten.slice(x, 1, x.shape[0] - 2, x.shape[0]) * 2, rows(9)
    ),
    "written at number of samples": cut(
        lambda x: aten.slice_scatter(x, x[:, :2], 1, x.shape[0] - 2, x.shape[0]), rows(9)
    ),
    "all written": cut(lambda x, y: aten.slice_scatter(x, y * 2, 0), rows(4), rows(4)),
    "whole triangle": mixed(lambda x: torch.ones(x.shape[0], x.shape[0]).triu() @ x, rows(4)),
    "by place": mixed(lambda x: x * torch.arange(x.shape[0])[:, None], rows(4)),
    "squeezed anywhere": mixed(lambda x: aten.squeeze.default(x) * 2, rows(1, 4)),
    "squeezed": cut(lambda x: aten.squeeze.dims(x, [1, 3]) * 2, (tensor(3, 1, BATCH, 1), 2)),
    "unbound": cut(lambda x: x.unbind(1)[1] * 2, (batched(2), 2)),
    "made beside samples": mixed(lambda x: [aten.new_empty_strided(x, [4], [1]), -x], rows(4)),
    "filled with the number of samples": cut(
        lambda x: x + torch.full((x.shape[0], 4), x.shape[0]), rows(4)
    ),
    "diagonal": mixed(lambda x: aten.diagonal_copy(x), rows(4)),
    "roll of all": mixed(lambda x: aten.roll(x, [1]), rows(4)),
    "flat norm": mixed(lambda x: x.flatten().cumsum(0), rows(4)),
}
TABLES = {
    "embedding": cut(lambda i, t: F.embedding(i, t), numbers(5, 3), shared(5, 4)),
    "embedding of samples": mixed(lambda t: F.embedding(torch.tensor([1, 0]), t), rows(4)),
    "rows of a table": cut(lambda i, t: t[i], numbers(5), shared(5, 4)),
    "two indices": cut(lambda i, j, t: t[i, j], numbers(5), numbers(4), shared(5, 4)),
    "two indices apart": cut(
        lambda i, j, t: t[i, :, j], numbers(5, 1), numbers(4, 2), shared(5, 3, 4)
    ),
    "unsafe index": cut(lambda i, t: aten._unsafe_index(t, [None, i]), numbers(4, 2), shared(5, 4)),
    "columns": cut(lambda x, j: x[:, j], rows(4), CHOSEN),
    "columns apart": cut(lambda x, j: x[j, :, j], (tensor(3, BATCH, 4), 1), CHOSEN),
    "columns in front": cut(lambda x, j: x[j, j], (tensor(3, 4, BATCH, 2), 2), CHOSEN),
    "samples by samples": mixed(lambda x, j: x[j], rows(4), numbers(BATCH)),
    "samples by table": mixed(lambda x, j: x[j], rows(4), CHOSEN),
    "a table gathered": mixed(lambda i, t: t.gather(1, i), numbers(4, 2), shared(9, 4)),
    "rows added": cut(
        lambda i, v: torch.zeros(5, 4).index_put((i,), v, accumulate=True), numbers(3), rows(4)
    ),
    "rows added, unsafe": cut(
        lambda i, v: aten._unsafe_index_put(torch.zeros(5, 4), [i], v, True), numbers(3), rows(4)
    ),
    "rows added where": cut(
        lambda i, v: aten._unsafe_masked_index_put_accumulate(
            torch.zeros(5, 4), (i > 0)[..., None], [i], v
        ),
        numbers(3, 2),
        rows(2, 4),
    ),
    "rows added in two orders": mixed(
        lambda i, v: torch.zeros(5, 4).index_put((i.flatten(),), v.flatten(0, 1), accumulate=True),
        numbers(3, 5),
        SEQUENCE,
    ),
    "rows written": mixed(lambda i, v: torch.zeros(9, 4).index_put((i,), v), numbers(9), rows(4)),
    "rows added to ones": mixed(
        lambda i, v: torch.ones(5, 4).index_put((i,), v, accumulate=True), numbers(3), rows(4)
    ),
    "truths added": mixed(
        lambda i, v: torch.zeros(5, 4, dtype=torch.bool).index_put((i,), v > 0.5, accumulate=True),
        numbers(3),
        rows(4),
    ),
    "columns added": cut(
        lambda x, j, v: aten.index_put(x, [None, j], v, True), rows(4), CHOSEN, rows(2)
    ),
    "columns written apart": cut(
        lambda x, j, v: aten.index_put(x, [j, None, j], v),
        (tensor(3, BATCH, 4), 1),
        CHOSEN,
        (tensor(2, BATCH), 1),
    ),
    "columns of each sample": mixed(
        lambda x, j, v: aten.index_put(x, [None, j], v),
        (tensor(3, BATCH), 1),
        numbers(BATCH),
        shared(1),
    ),
    "embedding gradient": cut(
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, False), rows(4), numbers(5)
    ),
    "embedding gradient in two orders": mixed(
        lambda g, i: aten.embedding_dense_backward(g.flatten(0, 1), i.flatten(), 9, -1, False),
        SEQUENCE,
        numbers(9, 5),
    ),
    "embedding gradient by frequency": mixed(
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True), rows(4), numbers(5)
    ),
}

ROUTING = {
    "one-hot": cut(lambda i: F.one_hot(i, 4) * 2, numbers(4, 3)),
    "mask of experts": cut(
        lambda x: torch.zeros_like(x).scatter(1, x.topk(2, 1)[1], True).bool(), rows(4)
    ),
    "groups": cut(
        lambda x: x.view(-1, 2, 2).topk(2, -1)[0].sum(-1).topk(1, -1)[1].repeat_interleave(2, 1),
        rows(4),
    ),
    "each token twice": cut(lambda x: x.flatten(0, 1).repeat_interleave(2, 0) * 2, rows(3, 4)),
    "expert's weights": cut(lambda i, w, x: w[i].bmm(x), numbers(4), shared(4, 3, 2), rows(2, 1)),
    "histogram": mixed(lambda i: torch.histc(i.float(), 4, 0, 3), numbers(4)),
    "count": mixed(lambda i: i.bincount(minlength=4), numbers(4)),
    "count by one-hot": cut(lambda i: F.one_hot(i, 4).sum(0), numbers(4)),
    "places by expert": mixed(lambda i: i.argsort(stable=True), numbers(4)),
    "place within expert": mixed(lambda i: F.one_hot(i, 4).cumsum(0), numbers(4)),
    "chosen tokens": mixed(lambda x: x[(x > 0.5).any(1).nonzero()[:, 0]], rows(4)),
    "selected numbers": mixed(lambda x: x.masked_select(x > 0.5), rows(4)),
    "scattered by mask": mixed(lambda x, y: x.masked_scatter(x > 0.5, y), rows(4), rows(4, seed=1)),
    "tokens put back": mixed(
        lambda x, i: torch.zeros_like(x).index_add(0, i, x), rows(4), numbers(BATCH)
    ),
    "tokens by expert": mixed(
        lambda x, w, o: torch._grouped_mm(x.bfloat16(), w.bfloat16(), o),
        rows(8),
        shared(2, 8, 8),
        (torch.tensor([2, BATCH], dtype=torch.int32), None),
    ),
    "drawn experts": mixed(lambda x: x.multinomial(2), rows(4)),
    "medians": mixed(lambda x: x.median(1)[0], rows(4)),  # could be cut: nobody wrote a rule
}
PLAIN = {**ROUTING, **PRODUCTS, **SUMS, **PLACES, **TABLES}
