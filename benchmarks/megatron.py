"""The same cases as layers of megatron-core: `dynaflow bench --host megatron`, or `megatron-sp`.

`eager` is Megatron as shipped, its asynchronous all-reduce of dgrads included; `compile` is our
traceable replacements under torch.compile, one graph a layer, in sequence: what gains count over.
Without collectives a reduction is the rank's own part, a gathered sequence its own part repeated.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from dynaflow_train.benchmarks.variants import Bed
from dynaflow_train.benchmarks.within import Within, removed
from dynaflow_train.capture import correct_gradients
from dynaflow_train.integrations import megatron
from dynaflow_train.integrations.megatron import linear, mappings

if TYPE_CHECKING:
    from torch import Tensor

    from dynaflow_train.strategy import Strategy


class Stack(torch.nn.Module):
    """Layers and last norm: [s, b, h] -> [s, b, h]; with sequence parallelism s is the rank's."""

    def __init__(self, config: Any, tokens: int) -> None:
        super().__init__()
        on_cpu = config.use_cpu_initialization
        rotary: Any = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=on_cpu)
        self.positions = rotary(tokens)
        spec: Any = get_gpt_layer_local_spec(normalization=config.normalization)
        self.decoder = TransformerBlock(config, spec)

    def forward(self, inputs_embeds: Tensor) -> Any:
        """Under the name that the steps read."""
        given: Any = {"attention_mask": None, "rotary_pos_emb": self.positions}
        found = self.decoder(hidden_states=inputs_embeds, **given)
        return types.SimpleNamespace(last_hidden_state=found)


@dataclass
class MegatronBed(Bed):
    """Makes the variants of megatron-core's layers; Megatron's groups span all ranks.

    Attributes:
        sequence_parallel: whether the sequence is cut outside of attention and MLP.
    """

    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Groups and replacements, once in a process."""
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(self.mesh.size())
            megatron.apply()

    def made(self) -> torch.nn.Module:
        """With our replacements."""
        case, ranks = self.case, self.mesh.size()
        whole = case.cut(ranks) // ranks
        on_cpu = self.device.type == "cpu"
        config = TransformerConfig(
            num_layers=case.layers,
            hidden_size=case.hidden,
            num_attention_heads=case.heads // whole,
            num_query_groups=case.kv_heads // whole,
            kv_channels=case.hidden // case.heads,
            ffn_hidden_size=case.ffn // whole,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=not on_cpu,
            bias_dropout_fusion=not on_cpu,
            add_bias_linear=False,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=ranks,
            sequence_parallel=self.sequence_parallel,
            params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            use_cpu_initialization=on_cpu,
            transformer_impl="local",
        )
        torch.manual_seed(0)
        # A generator for CUDA; on the CPU, where there is none, a stand-in.
        model_parallel_cuda_manual_seed(1, inference_rng_tracker=on_cpu)
        return Stack(config, case.tokens).to(self.device).train()

    def shipped(self) -> torch.nn.Module:
        """Megatron's own; outside of a capture the fused attention alone would differ from it."""
        model = self.sharded()
        plain: Any = DotProductAttention.forward
        for module in model.modules():
            if isinstance(module, DotProductAttention):
                module.forward = types.MethodType(plain.__wrapped__, module)
        return model

    def bare(self) -> torch.nn.Module:
        """Without collectives."""
        return Within(self.sharded(own=True), functools.partial(removed, linear, mappings))

    def compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        """One graph a layer."""
        return Within(super().compiled(model), correct_gradients)

    def scheduled(self, strategy: Strategy, **options: Any) -> torch.nn.Module:
        """By a strategy."""
        model = self.sharded()
        return megatron.compile(model, strategy, executor=self.executor, **options)

    def inputs(self) -> dict[str, Any]:
        """Random activations [s, b, h], the rank's part of them where the sequence is cut."""
        case, parts = self.case, self.mesh.size() if self.sequence_parallel else 1
        shape = (case.tokens // parts, case.batch, case.hidden)
        x = torch.randn(shape, device=self.device, dtype=self.dtype).requires_grad_()
        return {"inputs_embeds": x}
