"""Small models of every odd kind, each with its inputs and what the engine has to do with it.

A case says how to make a module and a batch of inputs, on which dimension the batch lies, and which
operators mix samples (`mixes`: they must run merged).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.modules import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attached,
    Block,
    CausalLM,
    Conv,
    Counting,
    Double,
    Net,
    Outputs,
    Recurrent,
    Shared,
    Views,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.stepping import Inputs


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        make: the module, with random parameters.
        inputs: batch size -> inputs.
        batch_dim: where the batch lies in the first input.
        mixes: operators that must run merged, as the report names them.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    batch_dim: int = 0
    mixes: tuple[str, ...] = ()


def rows(*shape: int) -> Callable[[int], Inputs]:
    """One input [batch, *shape]."""
    return lambda b: (torch.randn(b, *shape),)


def second(*shape: int) -> Callable[[int], Inputs]:
    """One input [shape[0], batch, *shape[1:]]."""
    return lambda b: (torch.randn(shape[0], b, *shape[1:]),)


def ids(b: int) -> Inputs:
    """Token ids [batch, length]."""
    return (torch.randint(VOCABULARY, (b, LENGTH)),)


class Function(nn.Module):
    """A function of the inputs after a linear layer, which gives it parameters and a backward."""

    def __init__(self, function: Callable[..., object], width: int = WIDTH) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(width, width), function

    def forward(self, x: Tensor, *more: Tensor) -> object:
        return self.function(torch.tanh(self.lin(x)), *more)


def of(function: Callable[..., object], inputs: object = None, **fields: object) -> Case:
    """A case of one function of [batch, WIDTH]."""
    return Case(lambda: Function(function), inputs or rows(WIDTH), **fields)


def labelled(b: int) -> Inputs:
    """Tokens and labels with uneven numbers of valid ones in each sample."""
    tokens = ids(b)[0]
    labels = tokens.clone()
    for sample in range(b):
        labels[sample, : sample % LENGTH] = -100
    return tokens, labels


def by_samples(x: Tensor) -> Tensor:
    """Numbers and tables that depend on which sample, and how many, there are."""
    b = x.shape[0]
    place = torch.arange(b, device=x.device, dtype=x.dtype)
    return x * (1 + place)[:, None] / b


def contrast(x: Tensor) -> Tensor:
    """In-batch contrastive loss."""
    return F.cross_entropy((x @ x.T).float() / 0.5, torch.arange(x.shape[0], device=x.device))


def flat_tokens(x: Tensor) -> Tensor:
    """[b, s, h] -> [b * s, h], left flat."""
    return x.view(-1, x.shape[-1]) * 2


TABLE = torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH)


def with_mask(shape: Callable[[int], tuple[int, ...]]) -> Callable[[int], Inputs]:
    """[b, s, 8] and an additive mask of the given shape."""
    return lambda b: (torch.randn(b, LENGTH, 8), torch.randn(shape(b)))


def with_rotary(*front: str) -> Callable[[int], Inputs]:
    """[b, s, 8], no mask, tables [*front, s, 4]; "b" is the batch, "1" a dimension of one."""

    def make(b: int) -> Inputs:
        angle = torch.randn(*({"b": b, "1": 1}[f] for f in front), LENGTH, 4)
        return (torch.randn(b, LENGTH, 8), None, angle.cos(), angle.sin())  # type: ignore[return-value]

    return make


def bool_mask(b: int) -> Inputs:
    """[b, s, 8] and a boolean mask [b, 1, s, s], lower triangular with a length per sample."""
    lengths = torch.arange(b) % LENGTH + 1
    allowed = torch.arange(LENGTH)[None, :] < lengths[:, None]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.randn(b, LENGTH, 8), causal & (allowed[:, None, None] | torch.eye(LENGTH).bool())


def picked(b: int) -> Inputs:
    """[b, h] and one index per sample."""
    return torch.randn(b, WIDTH), torch.randint(WIDTH, (b,))


SPLIT: dict[str, Case] = {
    "mlp": Case(lambda: Net(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)), rows(WIDTH)),
    "bias_free": Case(lambda: Net(nn.Linear(WIDTH, WIDTH, bias=False)), rows(LENGTH, WIDTH)),
    "block": Case(Block, rows(LENGTH, 8)),
    "block_sbh": Case(lambda: Block("sbh"), second(LENGTH, 8), batch_dim=1),
    "conv": Case(Conv, rows(2, 8, 8)),
    "instance_norm": Case(lambda: Conv(nn.InstanceNorm2d), rows(2, 8, 8)),
    "shared": Case(Shared, rows(WIDTH)),
    "views": Case(Views, lambda b: (torch.randn(b, WIDTH), torch.randn(b, 3))),
    "recurrent": Case(Recurrent, rows(3, WIDTH)),
    "in_place": Case(Attached, lambda b: (torch.randn(b, WIDTH), torch.zeros(b, WIDTH))),
    "flat_bs": of(flat_tokens, rows(LENGTH, WIDTH)),
    "flat_sb": of(flat_tokens, second(LENGTH, WIDTH), batch_dim=1),
    "function": of(lambda x: Double.apply(x) + x),
    "mask_shared": Case(Block, with_mask(lambda b: (LENGTH, LENGTH))),
    "mask_of_one": Case(Block, with_mask(lambda b: (1, 1, LENGTH, LENGTH))),
    "mask_batch": Case(Block, with_mask(lambda b: (b, 1, LENGTH, LENGTH))),
    "mask_bool": Case(Block, bool_mask),
    "rotary_shared": Case(Block, with_rotary()),
    "rotary_of_one": Case(Block, with_rotary("1", "1")),
    "rotary_batch": Case(Block, with_rotary("b", "1")),
    "expand": of(
        lambda x: torch.cat([x.new_ones(1, 1, WIDTH).expand(x.shape[0], 1, WIDTH), x], 1).mean(1),
        rows(LENGTH, WIDTH),
    ),
    "einsum": of(lambda x: torch.einsum("bsh,bth->bst", x, x).softmax(-1), rows(LENGTH, WIDTH)),
    "stack": of(lambda x: torch.stack([x, x * 2, x.flip(-1)], 1).amax(1)),
    "topk": of(lambda x: x.topk(3, -1).values * x.sort(-1).values[:, :3]),
    "gather": of(lambda x, i: x.gather(1, i[:, None]), picked),
    "one_hot": of(lambda x, i: x * F.one_hot(i, WIDTH).to(x.dtype), picked),
    "loss_per_sample": of(lambda x, i: F.cross_entropy(x.float(), i, reduction="none"), picked),
    "doubled": of(lambda x: torch.cat([x, x * 2], 0)),
    "doubled_back": of(lambda x: sum(torch.cat([x, x * 2], 0).chunk(2))),
    "turned": of(lambda x: x.T.contiguous() * 2),
    "select_columns": of(lambda x, i: x + TABLE.T.to(x.dtype).index_select(1, i).T, picked),
    "norms": of(lambda x: x / x.norm(dim=-1, keepdim=True) + x.std(-1, keepdim=True)),
    "regrouped": of(lambda x: x.view(x.shape[0], 2, 3).transpose(0, 1).reshape(-1, 3)),
    "padded": of(lambda x: F.pad(x, (1, 1))),
}

MIXING: dict[str, Case] = {
    "causal_lm": Case(CausalLM, labelled, mixes=("div",)),
    "outputs": Case(Outputs, rows(LENGTH, WIDTH), mixes=("mean",)),
    "batch_norm": Case(
        lambda: Net(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        rows(WIDTH),
        mixes=("var_mean",),
    ),
    "batch_norm_2d": Case(lambda: Conv(nn.BatchNorm2d), rows(2, 8, 8), mixes=("var_mean",)),
    "contrast": of(contrast, mixes=("mm",)),
    "softmax": of(lambda x: x.softmax(0), mixes=("softmax|amax",)),
    "cumsum": of(lambda x: x.cumsum(0), mixes=("cumsum",)),
    "flip": of(lambda x: x.flip(0) * x, mixes=("flip|rev",)),
    "roll": of(lambda x: x.roll(1, 0) * x, mixes=("index|roll|cat|slice",)),
    "sort": of(lambda x: x.sort(0).values, mixes=("sort",)),
    "buffers": Case(Counting, rows(WIDTH), mixes=("mean",)),
    "mean_centred": of(lambda x: x - x.mean(0), mixes=("mean",)),
    "sum_expanded": of(
        lambda x: x - x.sum(0, keepdim=True).expand(x.shape[0], -1) / 3, mixes=("sub|expand",)
    ),
    "sum_floored": of(
        lambda x: x * torch.div(x.sum(0), 0.3, rounding_mode="floor"), mixes=("div",)
    ),
    "sum_as_bool": of(lambda x: x * x.sum(0).bool() * x.sum(0).int(), mixes=("convert|copy|ne",)),
    "gram": of(lambda x: x @ torch.tanh(x.T @ x), mixes=("tanh",)),
    "std": of(lambda x: x / x.std(0), mixes=("var",)),
    "rms_of_all": of(lambda x: x * x.square().mean().rsqrt(), mixes=("mean",)),
    "by_samples": of(by_samples, mixes=("arange|iota",)),
    "table_by_sample": of(lambda x: x + TABLE[: x.shape[0]].to(x.dtype), mixes=("slice",)),
    "gather_from_table": of(
        lambda x, i: x[:, :1] * TABLE.to(x.dtype).gather(1, i[:, None]), picked, mixes=("gather",)
    ),
    "square": of(
        lambda x: (x @ x.T + torch.ones(x.shape[0], x.shape[0]).triu()).sum(1).to(x.dtype),
        mixes=("mm",),
    ),
    "picked_rows": of(
        lambda x, i: x[torch.arange(x.shape[0]), i] * x[0, 0], picked, mixes=("iota|arange",)
    ),
    "pairs": of(lambda x: torch.cdist(x.float(), x.float().flip(0) + 3).sum(1), mixes=("cdist",)),
    "half": of(lambda x: torch.cat([x[::2], x[1::2]], 0), mixes=("slice",)),
    "neighbours": of(lambda x: x[1:] * x[:-1], mixes=("slice",)),
    "segments": of(
        lambda x, i: x.new_zeros(WIDTH, WIDTH).index_add(0, i, x).tanh()[i],
        picked,
        mixes=("tanh",),
    ),
    "tokens_in_pairs": of(
        lambda x: (x.view(-1, 2, WIDTH) * 2).sum(1), lambda b: rows(WIDTH)(2 * b), mixes=("view",)
    ),
    "losses": of(
        lambda x, i: (
            F.cross_entropy(x.float(), i, label_smoothing=0.1)
            + F.mse_loss(x.float(), TABLE[i])
            + F.smooth_l1_loss(x.float(), TABLE[i])
            + F.kl_div(x.float().log_softmax(-1), TABLE[i].softmax(-1), reduction="batchmean")
            + F.binary_cross_entropy_with_logits(x.float(), TABLE[i].sigmoid())
        ),
        picked,
        mixes=("div|mean",),
    ),
}

ALL: dict[str, Case] = {**SPLIT, **MIXING}
