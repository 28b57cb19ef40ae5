"""200 steps of a tiny Qwen3-MoE, experts over two ranks, and the same model trained whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynaflow_train as df
from dynaflow_train.integrations.hf.expert_parallel import parallelize
from tests.hf.models import build, tokens

STEPS, BATCHES, EVERY = 200, 4, 20
TINY = {"hidden_size": 16, "moe_intermediate_size": 12, "intermediate_size": 16}


def _optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-4, foreach=False)


def _given(step: int, ranks: Any) -> Tensor:
    """[4 a rank, 8]; the order of `ranks` is the order of samples, and so of additions."""
    return torch.cat([tokens(100 * rank + step % BATCHES, 4, 9) for rank in ranks])


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _experts_of(model: nn.Module) -> Tensor:
    """[layers, tokens, k], ascending: which experts the tokens of one batch go to."""
    found: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    handles = [g.register_forward_hook(lambda m, i, out: found.append(out[2])) for g in gates]
    with torch.no_grad():
        model(input_ids=_given(0, (0, 1))[:, :-1])
    for handle in handles:
        handle.remove()
    return torch.stack(found).sort().values


def _whole(dtype: torch.dtype, order: Any) -> tuple[list[float], list[Tensor]]:
    """Losses and routes of one process with all tokens; `order` of its samples."""
    model = build("qwen3_moe", **TINY).to(dtype)
    model.config._experts_implementation = "eager"  # a loop over experts, of any dtype
    optimizer, losses, routes = _optimizer(model), [], []
    for step in range(STEPS):
        if step % EVERY == 0:
            routes.append(_experts_of(model))
        loss = _loss(model, _given(step, (0, 1))[order])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, routes


def _shared(rank: int) -> tuple[list[float], list[Tensor], set[Any]]:
    """Ours under DDP: the mean loss over ranks, routes, and the sizes of the plans that ran."""
    model = parallelize(build("qwen3_moe", **TINY), 2)
    wrapped = DistributedDataParallel(model)
    df.compile(model, "dual_batch", executor="eager", region="layer")
    optimizer, losses, routes = _optimizer(model), [], []
    for step in range(STEPS):
        if step % EVERY == 0:
            routes.append(_experts_of(model))
        loss = _loss(wrapped, _given(step, (rank,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / 2).tolist(), routes, {u.plan.sizes for u in df.plans(model)}


def train(rank: int) -> tuple[Any, Any]:
    """Ours; and the whole model's: in fp64 on rank 0, in fp32 in five orders of additions."""
    ours = _shared(rank)
    if rank == 0:
        orders = [torch.arange(8).roll(1), torch.arange(8).roll(5)]
        exact = [_whole(torch.float64, slice(None))]
    else:
        orders = [torch.arange(8), torch.arange(8).flip(0), torch.arange(8).roll(3)]
        exact = []
    return ours, exact + [_whole(torch.float32, order) for order in orders]
