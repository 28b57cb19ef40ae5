"""Small GPT models of megatron-core on two ranks, and one training step of them."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import Any

import torch

from tests.megatron import cpu

SEQUENCE, BATCH, VOCABULARY, HIDDEN = 16, 4, 64, 32


@dataclasses.dataclass(frozen=True)
class Case:
    """What varies from test to test; the rest is small."""

    tp: int = 2
    pp: int = 1
    experts: int | None = None  # shared over the two ranks
    sequence_parallel: bool = False
    layers: int = 2
    groups: int = 4
    rms: bool = True
    gated: bool = True
    bias: bool = False
    qk_norm: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    bf16: bool = False
    rotary: bool = True
    more: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


def start(case: Case) -> None:
    """Megatron's groups and generators, on the CPU."""
    cpu.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        cpu.sizes_on_the_host()
        parallel_state.initialize_model_parallel(case.tp, case.pp, **experts_over(case))
        # Its fork is empty: megatron-core's own reads the state of a CUDA generator.
        model_parallel_cuda_manual_seed(123, inference_rng_tracker=True)


def stop() -> None:
    """So that another case may start in this process."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def experts_over(case: Case) -> dict[str, int]:
    """Megatron's sizes of groups for the experts."""
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    return {} if case.experts is None else sizes


def config(case: Case) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=case.groups,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        gated_linear_unit=case.gated,
        activation_func=torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        add_bias_linear=case.bias,
        add_qkv_bias=case.bias,
        normalization="RMSNorm" if case.rms else "LayerNorm",
        qk_layernorm=case.qk_norm,
        hidden_dropout=case.hidden_dropout,
        attention_dropout=case.attention_dropout,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        sequence_parallel=case.sequence_parallel,
        params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
        bf16=case.bf16,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
        num_moe_experts=case.experts,
        moe_token_dispatcher_type="alltoall",
        **experts_over(case),
        **{"bias_activation_fusion": False, **case.more},
    )


def build(case: Case) -> Any:
    """A GPT model, always with the same parameters. Sequence parallelism: within `apply` only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt import gpt_layer_specs as specs

        torch.manual_seed(1)
        found, norm = config(case), "RMSNorm" if case.rms else None
        spec: Any = specs.get_gpt_layer_local_spec(
            case.experts, qk_layernorm=case.qk_norm, normalization=norm
        )
        if "moe_layer_freq" in case.more:  # dense layers too
            spec = specs.get_gpt_decoder_block_spec(found, False, normalization=norm)
        return GPTModel(
            found,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope" if case.rotary else "learned_absolute",
        )


def batch(seed: int = 3, size: int = BATCH) -> dict[str, torch.Tensor]:
    """Tokens, labels, positions and the causal mask; True is masked."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (size, SEQUENCE))
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(SEQUENCE)[None].expand(size, -1),
        "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
        "labels": tokens.roll(-1, 1),
    }


def step(model: Any, inputs: dict[str, torch.Tensor], seed: int = 11) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step, by name."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@contextlib.contextmanager
def norms_alone():
    """The norm's permission without anything else of ours: what a reference run needs."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from dynaflow_train.integrations.megatron import norm

    plain = WrappedTorchNorm.__dict__["__new__"]
    WrappedTorchNorm.__new__ = norm.replacement(plain.__func__)
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = plain
