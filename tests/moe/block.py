"""A layer with experts, whole or shared over ranks, and what a step of it must give."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynaflow_train.integrations.experts import define, grouped_linear, run_experts
from tests.engine.stepping import Result, leaves, weighted

WIDTH, INNER, LENGTH = 8, 6, 3


class Layer(nn.Module):
    """Mixing over a sequence, router, experts, residual; and the router's statistics.

    `push` [b, 1, experts] is added to the logits: it decides which experts are chosen.
    """

    def __init__(self, experts: int, k: int, ranks: int = 1) -> None:
        super().__init__()
        self.k, self.experts, self.ranks = k, experts, ranks
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.first = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(experts, WIDTH, INNER) / INNER**0.5)
        self.group = ""

    def shard(self) -> Layer:
        """Keep this rank's experts."""
        define()
        assert dist.group.WORLD is not None
        rank, self.ranks, self.group = dist.get_rank(), dist.get_world_size(), ""
        self.group = dist.group.WORLD.group_name
        own = slice(rank * self.experts // self.ranks, (rank + 1) * self.experts // self.ranks)
        self.first = nn.Parameter(self.first[own].detach().clone())
        self.second = nn.Parameter(self.second[own].detach().clone())
        return self

    def forward(self, x: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.mix(x))
        logits = self.router(hidden) + push
        chances = logits.softmax(-1)
        weights, index = chances.flatten(0, 1).topk(self.k)
        flat = hidden.flatten(0, 1)
        if self.ranks == 1:
            out = self.plain(flat, index, weights)
        else:
            local = self.experts // self.ranks
            out = run_experts(flat, index, weights, self.rows, (self.group, self.ranks), local)
        balance = chances.mean((0, 1)).square().sum() + logits.logsumexp(-1).square().mean()
        return x + out.view(x.shape), balance

    def rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, self.first, ends, transposed=False).chunk(2, -1)
        inner = nn.functional.silu(gate) * up
        return grouped_linear(inner, self.second, ends, transposed=False)

    def plain(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The textbook's loop."""
        out = torch.zeros_like(x)
        for expert in range(self.experts):
            token, slot = torch.where(index == expert)
            gate, up = (x[token] @ self.first[expert].T).chunk(2, -1)
            made = (nn.functional.silu(gate) * up) @ self.second[expert].T
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out


def make(experts: int, k: int, dtype: torch.dtype = torch.float32) -> Layer:
    """Always with the same parameters."""
    torch.manual_seed(3)
    return Layer(experts, k).to(dtype)


def inputs(size: int, experts: int, seed: int, favoured: tuple[int, ...] = ()) -> Any:
    """[b, s, h] of both ranks, first rank's first, and the push towards some experts."""
    given = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * size, LENGTH, WIDTH, generator=given)
    push = torch.randn(2 * size, 1, experts, generator=given)
    for place, expert in enumerate(favoured):
        push[..., expert] += 100.0 - 10 * place
    return x, push


def truth(experts: int, k: int, given: Any, dtype: torch.dtype, ranks: int = 2) -> list[Result]:
    """What each rank must see: the unsplit, unsharded step over all ranks' tokens."""
    model = make(experts, k, torch.float32).to(dtype)
    parts, found = [tuple(t.to(dtype) for t in each) for each in _chunks(given, ranks)], []
    for x, push in parts:
        x.requires_grad_()
        outputs = model(x, push)
        weighted(outputs).backward()
        found.append((x, leaves(outputs)))
    results = []
    for rank, (x, outputs) in enumerate(found):
        own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
        named = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        for name in ("first", "second"):
            named[f"gradient of {name}"] = named[f"gradient of {name}"][own]
        out = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
        results.append(Result({**named, **out, "gradient of input": x.grad}))
    return results


def _chunks(given: Any, ranks: int) -> list[Any]:
    return list(zip(*(t.clone().chunk(ranks) for t in given), strict=True))


def ours(model: nn.Module, given: Any, rank: int) -> Result:
    """This rank's step; gradients of what is whole are summed over the ranks."""
    model.zero_grad(set_to_none=True)
    x, push = _chunks(given, dist.get_world_size())[rank]
    x.requires_grad_()
    outputs = model(x, push)
    weighted(outputs).backward()
    named = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        if name not in ("first", "second"):
            dist.all_reduce(gradient)
        named[f"gradient of {name}"] = gradient
    out = {f"output {i}": t.detach() for i, t in enumerate(leaves(outputs))}
    return Result({**named, **out, "gradient of input": x.grad})


def worst(found: Result, plain: Result, exact: Result) -> tuple[float, str]:
    """How many times the plain run's own error a step is off, at worst, and where."""
    allowed = {k: 2 * e + 1e-5 for k, e in plain.errors(exact).items()}
    excess = {k: e / allowed[k] for k, e in found.errors(exact).items()}
    name = max(excess, key=excess.__getitem__)
    return excess[name], name
