"""Builds a case's model: tensor parallel, or cut as if it were but without collectives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaConfig, LlamaModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dynaflow_train.integrations.hf import sequence_parallel, tensor_parallel

if TYPE_CHECKING:
    from dynaflow_train.benchmarks.cases import Case

# transformers makes no mask for an attention that it does not know. For "sdpa" it looks for packed
# sequences, which stops the host at every forward; and while a CUDA graph is captured it builds an
# explicit mask (masking_utils.py, `find_packed_sequence_indices`, `_ignore_causal_mask_sdpa`): the
# recorded step would run another, slower attention than all others.
ATTENTION = "dynaflow_bench_sdpa"


def config(case: Case, cut: int = 1) -> LlamaConfig:
    """The model's; `cut` divides heads and FFN as tensor parallelism would."""
    return LlamaConfig(
        hidden_size=case.hidden,
        num_attention_heads=case.heads // cut,
        num_key_value_heads=case.kv_heads // cut,
        head_dim=case.hidden // case.heads,
        intermediate_size=case.ffn // cut,
        num_hidden_layers=case.layers,
        vocab_size=256,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation=ATTENTION,  # pyright: ignore[reportCallIssue]
    )


def build(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mesh: Any = None,
    cut: int = 1,
    in_parts: bool = False,
) -> LlamaModel:
    """The model on the device, equal on all ranks, in training mode.

    Args:
        case: what to build.
        device: where.
        dtype: of the parameters.
        mesh: ranks that share the layers; a case with shapes of a larger group is cut further.
        cut: without a mesh, as many ranks as would share the layers; no collectives.
        in_parts: with a mesh, cut the sequence too.

    Raises:
        UnsupportedError: the layers cannot be cut so.
    """
    ranks = cut if mesh is None else mesh.size()
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    whole = cut if mesh is None else case.cut(ranks) // ranks
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(config(case, whole))
    torch.nn.Module.to(model, dtype)
    model.train()
    if mesh is not None and (ranks == 1 or ranks != dist.get_world_size()):
        _over(model, mesh, in_parts=in_parts)
    elif mesh is not None:
        tensor_parallel.parallelize(model, ranks, sequence=in_parts)
    return model


def _over(model: LlamaModel, mesh: Any, *, in_parts: bool) -> None:
    """Our styles on one rank, for which transformers installs none, or a part of the ranks.

    On one rank the same ops and collectives are there; what they move stays on the rank.
    """
    undo = tensor_parallel.apply(sequence_parallel.STYLES)
    try:
        plan = (sequence_parallel if in_parts else tensor_parallel).plan_for(model)
        for name, module in model.named_modules():
            if style := plan.get(re.sub(r"\.\d+", ".*", "." + name)[1:]):
                for parameter in dict(module.named_parameters(recurse=False)):
                    ALL_PARALLEL_STYLES[style].shard_param(module, parameter, mesh)
                ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
        if in_parts:
            model._device_mesh = mesh
            sequence_parallel.cut_stream(model)
    finally:
        undo()


def share(model: torch.nn.Module, weights: torch.nn.Module) -> None:
    """Let `model` use the parameters of `weights`, an equal model: one copy serves all variants."""
    for name, parameter in list(weights.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)
