"""The models and sizes that are measured: Llama-8B- and -70B-like layers, cut for a TP group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from dynaflow_train.integrations.hf import tensor_parallel


@dataclass(frozen=True)
class Case:
    """`layers` layers of a model, `batch` x `tokens` tokens on every rank of the TP group."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    batch: int
    tokens: int

    def config(self, cut: int = 1) -> LlamaConfig:
        """The model; `cut` divides heads and FFN as tensor parallelism would."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads // cut,
            num_key_value_heads=self.kv_heads // cut,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.ffn // cut,
            num_hidden_layers=self.layers,
            vocab_size=256,
            max_position_embeddings=8192,
            use_cache=False,
            attn_implementation="sdpa",
        )

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Random embeddings [b, s, h] that want a gradient."""
        shape = (self.batch, self.tokens, self.hidden)
        x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
        return {"inputs_embeds": x}


LLAMA_8B = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
LLAMA_70B = {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}
CASES = {
    "8b-2x4096": Case("8b-2x4096", **LLAMA_8B, layers=4, batch=2, tokens=4096),
    "8b-2x1024": Case("8b-2x1024", **LLAMA_8B, layers=4, batch=2, tokens=1024),
    "70b-2x4096": Case("70b-2x4096", **LLAMA_70B, layers=2, batch=2, tokens=4096),
    "70b-2x1024": Case("70b-2x1024", **LLAMA_70B, layers=2, batch=2, tokens=1024),
    "tiny": Case("tiny", **TINY, layers=2, batch=2, tokens=16),
}


def build(
    case: Case, device: torch.device, dtype: torch.dtype, *, mesh: Any = None, cut: int = 1
) -> LlamaModel:
    """The model on the device: tensor parallel over `mesh`, or cut by `cut` without collectives."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(case.config(cut)).to(dtype)
    model.train()
    return model if mesh is None else tensor_parallel.parallelize(model, mesh.size())
