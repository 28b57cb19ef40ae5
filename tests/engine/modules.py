"""The modules of the zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LENGTH, VOCABULARY = 6, 5, 11


class Net(nn.Module):
    """Modules of torch one after another, called from a frame that Dynamo traces."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    """A transformer layer: causal attention and MLP, [b, s, h]; `order` "sbh" for [s, b, h]."""

    def __init__(self, order: str = "bsh", heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.order, self.heads = order, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def attention(
        self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        if self.order == "sbh":
            return self.attend(x.transpose(0, 1), mask, rotary).transpose(0, 1)
        return self.attend(x, mask, rotary)

    def attend(
        self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if rotary is not None:
            cos, sin = rotary
            q, k = (t * cos + t.flip(-1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(b, s, h))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        rotary = None if cos is None or sin is None else (cos, sin)
        x = x + self.attention(self.norm1(x), mask, rotary)
        return x + self.mlp(self.norm2(x))


class CausalLM(nn.Module):
    """Embedding, blocks, tied head, cross-entropy over shifted labels: mean over valid tokens."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.norm(self.blocks(self.embed(tokens))) @ self.embed.weight.T
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), ignore_index=-100)
        return loss, logits


class Conv(nn.Module):
    """Convolutions, pooling, normalisation in groups, a linear head."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda c: nn.GroupNorm(2, c)) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            norm(4),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2),
            nn.AvgPool2d(3),
            nn.Flatten(),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Outputs(nn.Module):
    """Many outputs: [b, h], [h, b], [b, s, s], a scalar of parameters, one of all samples, ids."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.lin(x)
        return {
            "plain": y,
            "turned": y.permute(2, 1, 0),
            "pairs": [torch.bmm(y, x.transpose(1, 2))],
            "penalty": (self.lin.weight**2).sum(),
            "loss": y.square().mean(),
            "best": y.argmax(-1),
        }


class Shared(nn.Module):
    """One layer used twice, one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.lin(self.lin(x)))) + x @ self.lin.weight


class Views(nn.Module):
    """Inputs, and views of them, among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.lin(x)
        return x, x[:, 1:3], y.transpose(0, 1), z, z[:, :2], z.view(-1, 2, 3), self.lin.weight.T


class Counting(nn.Module):
    """Changes buffers: a running sum over the samples, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        with torch.no_grad():
            self.steps += 1
            self.mean.mul_(0.9).add_(y.float().mean(0), alpha=0.1)
        return y * self.mean.to(y.dtype)


class Attached(nn.Module):
    """Adds to an input in place and to a slice of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = self.lin(x).clone()
        y[:, 1:3] *= 2
        state.add_(y.detach())
        return y + state


class Recurrent(nn.Module):
    """A state per sample made inside, and a cell run over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


class Double(torch.autograd.Function):
    """Writes in place into what it returns, as Megatron's mappings do."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(2)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
