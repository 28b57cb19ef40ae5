"""Layers of real hosts, forward and backward: what is cut, what is merged, and where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, functionalize

from dynaflow_train.split.table import packet_name
from tests.split.cases import tensor
from tests.split.tracing import BATCH, Traced, check, trace

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, HEAD, WORDS = 8, 4, 3


def joint(
    forward: Callable[..., Tensor], hidden: tuple[Tensor, int], *, whole: bool = True, **named: Any
) -> Traced:
    """Forward and backward as one graph; the gradient lies as the output.

    Nothing is written in place, as behind AOTAutograd: in all of it, or in the forward only.
    """
    hidden_states, dim = hidden
    names, values = list(named), [p.detach() for p in named.values()]

    def function(x: Tensor, g: Tensor, *given: Tensor) -> list[Any]:
        def run(x: Tensor, *given: Tensor) -> Tensor:
            return forward(x, dict(zip(names, given, strict=True)))

        out, pull = torch.func.vjp(run if whole else functionalize(run), x, *given)
        return [out, *pull(g)]

    function = functionalize(function) if whole else function
    dims = [dim, dim, *[None] * len(values)]
    return trace(function, [hidden_states, hidden_states.cos(), *values], dims)


def merged(traced: Traced) -> set[str]:
    """Operators that mix samples by themselves, not for what they read."""
    reasons = {n: r for n, r in traced.analysis.reasons.items() if "an input is only" not in r}
    return {packet_name(n) for n in reasons}


def moe_layer(kind: str, experts: str) -> nn.Module:
    """One decoder layer of transformers with four experts, two a token."""
    common = {
        "hidden_size": SIZE,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "attn_implementation": "eager",
        "experts_implementation": experts,
    }
    if kind == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as mixtral

        config = mixtral.MixtralConfig(**common, num_local_experts=4)
        return mixtral.MixtralDecoderLayer(config, 0)
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    config = qwen.Qwen3MoeConfig(**common, num_experts=4, moe_intermediate_size=8)
    return qwen.Qwen3MoeDecoderLayer(config, 0)


@pytest.mark.parametrize(
    ("kind", "experts"), [("mixtral", "batched_mm"), ("qwen3_moe", "grouped_mm")]
)
def test_a_layer_of_transformers_with_experts(kind, experts):
    layer = moe_layer(kind, experts)
    layer = layer if kind == "mixtral" else layer.mlp  # the whole layer once: a trace takes seconds
    dtype = torch.bfloat16 if experts == "grouped_mm" else torch.float32
    named = enumerate(layer.named_parameters())
    parameters = {n: (tensor(*p.shape, seed=i) - 0.6).to(dtype) for i, (n, p) in named}
    rotary = [tensor(1, WORDS, HEAD, seed=s).to(dtype) for s in (1, 2)]

    def forward(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        more = {"position_embeddings": rotary} if kind == "mixtral" else {}
        out = functional_call(layer, given, (x,), more)
        return x + (out[0] if isinstance(out, tuple) else out)

    traced = joint(forward, (tensor(BATCH, WORDS, SIZE).to(dtype), 0), **parameters)
    check(traced)
    assert set(traced.modes("topk")) == {"split"}
    if experts == "batched_mm":
        assert merged(traced) == set(), traced.analysis.reasons
    else:  # tokens of all samples are sorted by expert; behind it they are samples again
        assert merged(traced) == {"sort", "iota"}
        assert set(traced.modes("_grouped_mm")) == {"merged"}
        assert set(traced.modes("histc")) == {"merged"}
    last = traced.graph.output_node().args[0][0]
    assert traced.analysis.modes[last] == "split"


def test_routing_and_permutation_of_megatron():
    """[s, b, h] flattened to tokens, sequence first: router and loss, permute, experts, back."""
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    experts, top = 4, 2

    def forward(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        tokens = x.flatten(0, 1)
        count = tokens.shape[0]
        logits = tokens @ given["router"]
        probs, chosen = moe.topk_routing_with_score_function(
            logits, top, num_groups=2, group_topk=1
        )
        loss = moe.switch_load_balancing_loss_func(
            logits.softmax(-1), chosen.sum(0), count, top, experts, 0.1
        )
        mixed, weights, places, *_ = moe.permute(tokens, chosen, probs, num_out_tokens=count * top)
        mixed = F.silu(mixed @ given["up"]) @ given["down"] * weights[:, None]
        return moe.unpermute(mixed, places, tokens.shape).view(x.shape) + x * loss

    parameters = {
        "router": tensor(SIZE, experts, seed=1) - 0.6,
        "up": tensor(SIZE, 6, seed=2) - 0.6,
        "down": tensor(6, SIZE, seed=3) - 0.6,
    }
    # `whole` would meet an assertion of torch 2.11: index_select's backward with symbolic sizes
    traced = joint(forward, (tensor(WORDS, BATCH, SIZE), 1), whole=False, **parameters)
    check(traced)
    assert traced.modes("topk") == ["split"] * 3
    assert traced.modes("scatter")[:3] == ["split"] * 3  # behind them: gradients of the sorted
    assert merged(traced) == {"sort", "mul"}  # tokens by expert; the loss multiplies two sums
    last = traced.graph.output_node().args[0][0]
    assert traced.analysis.modes[last] == "split"
