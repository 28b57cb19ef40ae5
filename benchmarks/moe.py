"""Cases with experts: transformers' layers, each rank with tokens of its own, experts shared.

`eager` is those layers with the experts of `integrations.hf.expert_parallel`; `compile` is
torch.compile for each layer with a graph break around what has run-time sizes, the experts'
activation compiled for any number of rows. All of them make the experts' products by
`integrations.experts.grouped_linear` and average an expert's gradient over the ranks; nobody
averages what is whole on every rank. Without collectives each layer's experts get local rows, as
many as the ranks really send them (counted once, before): with the all-to-alls the exchange of the
counts and the host's wait for them are gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AttentionInterface,
    MixtralConfig,
    MixtralModel,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dynaflow_train import api
from dynaflow_train.benchmarks.models import ATTENTION
from dynaflow_train.benchmarks.specs import RESERVE
from dynaflow_train.benchmarks.variants import Bed
from dynaflow_train.integrations.experts import grouped_linear
from dynaflow_train.integrations.hf import expert_parallel
from dynaflow_train.integrations.hf.tensor_parallel import local_parameters

if TYPE_CHECKING:
    from dynaflow_train.benchmarks.cases import ExpertCase
    from dynaflow_train.strategy import Strategy

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def config(case: ExpertCase) -> Any:
    """The model's, whole."""
    common: dict[str, Any] = {
        "hidden_size": case.hidden,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.hidden // case.heads,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_experts_per_tok": case.top,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
        "use_cache": False,
        "attn_implementation": ATTENTION,
    }
    if case.model == "mixtral":
        return MixtralConfig(**common, num_local_experts=case.experts)
    own: dict[str, Any] = {
        "num_experts": case.experts,
        "moe_intermediate_size": case.ffn,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**common, **own)


def bias(experts: int) -> Tensor:
    """What a skewed case adds to the logits: -ln(1 + e) to expert e's, [experts].

    Of a router whose logits are all equal, expert e would be chosen first 1 / (1 + e) times as
    often as expert 0. The experts of a rank are neighbours, so the first rank gets most rows.
    """
    return -torch.arange(1, experts + 1, dtype=torch.float32).log()


def build(case: ExpertCase, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole model on the device, equal on all ranks, in training mode."""
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    torch.manual_seed(0)
    with torch.device(device):
        model = (MixtralModel if case.model == "mixtral" else Qwen3MoeModel)(config(case))
    torch.nn.Module.to(model, dtype)
    for layer in api.layers_of(model)[1] if case.skewed else ():
        router: Any = layer.get_submodule("mlp.gate")
        router.forward = functools.partial(_biased, router, bias(case.experts).to(device))
    return model.train()


def _biased(router: Any, add: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router's forward, `add` [experts] on its logits; both models' normalise the weights."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    logits = logits + add.to(logits.dtype)
    chances, chosen = torch.topk(logits.float().softmax(-1), router.top_k, dim=-1)
    weights = chances / chances.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen


@dataclass(eq=False)
class Local:
    """Stands for the ranks: rows that are there instead of what would come.

    Attributes:
        received: [ranks * own experts], rows that come from each rank for each own expert.
        number: of them all.
        pool: random rows [n, h], enough for either direction; nobody writes there.
    """

    received: Tensor
    number: int
    pool: Tensor

    def __call__(self, rows: Tensor, number: int) -> Tensor:
        """`number` rows in place of these; their gradient is as little theirs."""
        return cast("Tensor", _Instead.apply(rows, self.pool, number))


class _Instead(torch.autograd.Function):
    """No copy: rows and gradients are slices of the pool."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pool: Tensor, number: int) -> Tensor:
        ctx.pool, ctx.number = pool, rows.shape[0]
        return pool[:number].view(number, pool.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pool[: ctx.number].view(ctx.number, ctx.pool.shape[1]), None, None


def in_pieces(
    experts: Any,
    mesh: Any,
    activation: Callable[[Tensor], Tensor],
    seen: list[Tensor] | None = None,
    local: Local | None = None,
) -> Forward:
    """The forward of `expert_parallel.forward_of`, of which Dynamo traces only the weighted sum.

    Args:
        experts: stacked, this rank's.
        mesh: the ranks.
        activation: [rows, 2 * ffn] -> [rows, ffn].
        seen: gets the counts of received rows.
        local: what stands for the collectives.
    """
    group, size, own = mesh.get_group().group_name, mesh.size(), int(experts.num_experts)
    how: dict[str, Any] = {"transposed": bool(getattr(experts, "is_transposed", False))}
    c10d, ops = torch.ops._c10d_functional, torch.ops.dynaflow

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        with local_parameters(experts):
            rows = activation(grouped_linear(rows, experts.gate_up_proj, ends, **how))
            return grouped_linear(rows, experts.down_proj, ends, **how)

    @cast("Any", torch._dynamo.disable)
    def pairs(hidden: Tensor, index: Tensor) -> Tensor:
        order, place, counts = ops.sort_pairs(index, size * own)
        rows = ops.sort_rows(
            hidden.unsqueeze(1).expand(-1, index.shape[1], -1), order, place, index
        )
        if local is not None:
            rows, ends = ops.group_rows(local(rows, local.number), local.received, size)
            rows = ops.ungroup_rows(compute(rows, ends), local.received, size)
            return ops.unsort_rows(local(rows, index.numel()), order, place, index)
        equal = [own] * size
        received = c10d.wait_tensor(c10d.all_to_all_single(counts, equal, equal, group))
        if seen is not None:
            seen.append(received)
        sizes = ops.to_host(counts, received, group)
        rows, ends = ops.group_rows(ops.exchange_rows(rows, sizes, False, group), received, size)
        rows = ops.ungroup_rows(compute(rows, ends), received, size)
        return ops.unsort_rows(ops.exchange_rows(rows, sizes, True, group), order, place, index)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return (pairs(hidden, index) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    return forward


@dataclass
class ExpertBed(Bed):
    """Makes the variants of a case with experts.

    Attributes:
        received: of each layer, counted once; see `Local`.
    """

    received: list[Tensor] = field(default_factory=list[Tensor])

    def made(self, reserve: int = 0) -> torch.nn.Module:
        """Experts shared by the mesh; their products leave `reserve` SMs free."""
        model = build(cast("ExpertCase", self.case), self.device, self.dtype)
        return expert_parallel.parallelize(model, self.mesh.size(), reserve)

    def whole(self, dtype: torch.dtype) -> torch.nn.Module:
        """The model on one rank, weights as rounded for the others; experts in a loop."""
        model = build(cast("ExpertCase", self.case), self.device, self.dtype).to(dtype)
        model.config._experts_implementation = "eager"
        return model

    def averaged(self, name: str) -> Sequence[Any]:
        """Over the ranks, whose tokens the experts see."""
        return (self.mesh.get_group(),) if ".experts." in name else ()

    def scheduled(self, strategy: Strategy, **options: Any) -> torch.nn.Module:
        """By a strategy; `sm_reserve` among the options is for the experts' products."""
        model = self.sharded(reserve=options.pop(RESERVE, 0))
        return api.compile(model, strategy, executor=self.executor, **options)

    def compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        """torch.compile for each layer, in pieces around the experts."""
        return super().compiled(self._pieces(model))

    def bare(self) -> torch.nn.Module:
        """Not compiled: local rows, as many as the ranks send."""
        if not self.received:
            with torch.no_grad():
                self._pieces(self.sharded(), self.received)(**self.batch.inputs)
        model, numbers = self.sharded(), [int(each.sum()) for each in self.received]
        rows = max(*numbers, self.case.batch * self.case.tokens * cast("Any", self.case).top)
        pool = torch.randn(rows, self.case.hidden, device=self.device, dtype=self.dtype)
        for experts, received, number in zip(_experts(model), self.received, numbers, strict=True):
            activation = self._activation(experts)
            experts.forward = in_pieces(
                experts, self.mesh, activation, local=Local(received, number, pool)
            )
        model.dynaflow_bare = True  # type: ignore[assignment]
        return model

    def facts(self) -> dict[str, Any]:
        """How evenly rows are spread over the ranks, if that was counted."""
        if not self.received:
            return {}
        number = torch.stack([each.sum() for each in self.received]).sum()
        ranks = [torch.zeros_like(number) for _ in range(self.mesh.size())]
        dist.all_gather(ranks, number, group=self.mesh.get_group())
        found = [int(each) for each in ranks]
        mean = sum(found) / len(found)
        shares = ", ".join(f"{each / mean:.2f}" for each in found)
        return {"routing": f"rows at each rank's experts, over the mean: {shares}"}

    def _pieces(self, model: Any, seen: list[Tensor] | None = None) -> Any:
        if not hasattr(model, "dynaflow_bare"):
            for experts in _experts(model):
                experts.forward = in_pieces(experts, self.mesh, self._activation(experts), seen)
        return model

    def _activation(self, experts: Any) -> Callable[[Tensor], Tensor]:
        backend = "inductor" if self.executor == "inductor" else "aot_eager"
        return torch.compile(experts._apply_gate, backend=backend, dynamic=True)


def _experts(model: Any) -> list[Any]:
    """Of all layers."""
    return [layer.get_submodule("mlp.experts") for layer in api.layers_of(model)[1]]
