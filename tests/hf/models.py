"""Tiny random models, the same on every rank and in every process, and their oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "deepseek_v3": DeepseekV3Config,
}
LATENT = {  # DeepSeek's attention, whose first layer is dense
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS: dict[str, dict[str, Any]] = {  # of each layer; two for every token
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": LATENT | {"n_shared_experts": 1, "n_group": 2, "topk_group": 1},
}
VOCABULARY = 64


def build(name: str, *, layers: int = 2, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A causal LM with 32 hidden features, 4 query and 2 key/value heads, in fp32, training."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    torch.manual_seed(seed)
    sizes |= EXPERTS.get(name, {})
    model = AutoModelForCausalLM.from_config(CONFIGS[name](**{**sizes, **changes}))
    with torch.no_grad():  # norms start at one, biases at zero: give them values that show
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def tokens(seed: int, batch: int = 4, length: int = 12) -> Tensor:
    """Random token ids, [batch, length]."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Step:
    """What a training step came to: the losses of its micro-steps, every gradient by name."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def plain_step(model: nn.Module, batches: list[Tensor], gradients: Any = None) -> Step:
    """Forward and backward of each batch, gradients accumulated; `gradients` collects them."""
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    if gradients is None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    else:
        found = gradients(model)
    return Step(tuple(losses), {name: value.detach().clone() for name, value in found.items()})


def oracle(name: str, batches: list[Tensor], **changes: Any) -> tuple[Step, Step]:
    """The unsharded, uncompiled step: in fp32, and in fp64 as the truth."""
    plain = plain_step(build(name, **changes), batches)
    return plain, plain_step(build(name, **changes).double(), batches)


def _errors(step: Step, truth: Step) -> dict[str, float]:
    assert step.gradients.keys() == truth.gradients.keys()
    errors = {
        name: ((step.gradients[name] - value).norm() / value.norm()).item()
        for name, value in truth.gradients.items()
    }
    for i, (loss, wanted) in enumerate(zip(step.losses, truth.losses, strict=True)):
        errors[f"loss {i}"] = abs(loss - wanted) / abs(wanted)
    return errors


def worst_excess(step: Step, plain: Step, truth: Step, *, least: float = 5e-7) -> tuple[float, str]:
    """How many times the plain run's own rounding error a step is off, at worst, and where.

    A gradient that nearly cancels (of a key's bias) is badly known in the plain run too; an error
    below `least` is luck.
    """
    allowed = {name: max(error, least) for name, error in _errors(plain, truth).items()}
    excess = {name: error / allowed[name] for name, error in _errors(step, truth).items()}
    name = max(excess, key=excess.__getitem__)
    return excess[name], name
