"""Which of Megatron's experts a captured layer can stand for: every setting once.

Host names read here (megatron-core 0.19.2): what `core/transformer/transformer_config.py` says of
experts, `core/transformer/moe/moe_layer.py` `MoELayer`, `router.py` `TopKRouter` and `experts.py`
`SequentialMLP` beside it.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from dynaflow_train.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

SUPPORTED = "supported"
# What is supported, or of other dispatchers only; else why it is refused but for its default.
_TABLE = """
supported: num_moe_experts moe_ffn_hidden_size moe_layer_freq expert_model_parallel_size
moe_shared_expert_intermediate_size moe_shared_expert_gate moe_grouped_gemm moe_per_layer_logging
moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices
moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor moe_router_dtype
moe_router_enable_expert_bias moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff
moe_grad_scale_func moe_token_drop_policy moe_router_quantile_balancing_ema
supported: moe_flex_* moe_deepep_* moe_hybridep_* moe_ncclep_* moe_paged_stash_* inference_moe_*
moe_permute_fusion_into_hybridep moe_pad_experts_for_cuda_graph_inference
the strategy schedules all-to-alls and what runs beside them: moe_token_dispatcher_type
moe_enable_deepep overlap_moe_expert_parallel_comm moe_shared_expert_overlap
overlap_dispatch_backward_with_experts_wgrad
it chooses a token's experts by those of the whole batch: moe_router_load_balancing_type
an expert is whole on its rank: expert_tensor_parallel_size expert_gtp_weight_remat_size
expert_tensor_parallel_num_weight_shards
nothing is dropped or padded: moe_expert_capacity_factor moe_pad_expert_input_to_capacity
moe_token_dropping moe_expert_rank_capacity_factor moe_router_padding_for_quantization
moe_router_padding_for_fp8
it keeps or makes values outside of the graph: moe_enable_routing_replay moe_layer_recompute
moe_paged_stash moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased
experts are two products, gate beside up, weighted behind: moe_apply_probs_on_input add_bias_linear
activation_func_clamp_value glu_linear_offset activation_func_fp8_input_store
moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
it is TransformerEngine's, which cannot be traced: moe_router_fusion moe_permute_fusion
moe_latent_size moe_single_grouped_weight moe_single_grouped_bias use_te_activation_func
use_grouped_gemm_for_shared_expert"""
# What may be where that is not Megatron's default alone.
_ONLY: dict[str, tuple[Any, ...]] = {
    "moe_token_dispatcher_type": ("alltoall",),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "expert_tensor_parallel_size": (1, None),
    "add_bias_linear": (False,),
}


def verdict(name: str) -> str | None:
    """Of a setting that has been read: "supported", or why only its default is; else None."""
    why = ""
    for line in _TABLE.strip().splitlines():
        new, colon, names = line.rpartition(": ")
        why = new if colon else why
        if any(fnmatchcase(name, pattern) for pattern in names.split()):
            return why
    return None


def check_settings(config: Any) -> None:
    """Refuse a TransformerConfig with experts that are not captured, or settings nobody has read.

    Raises:
        UnsupportedError: names every setting, what it may be, and why.
    """
    found = list[str]()
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        may_be, why = _ONLY.get(name, (field.default,)), verdict(name)
        if why == SUPPORTED or not (why or "moe" in name or "expert" in name):
            continue
        if any(v not in may_be for v in (value if isinstance(value, list) else [value])):
            flag, wanted = name.replace("_", "-"), " or ".join(map(repr, may_be))
            why = why or "dynaflow_train does not know it"
            found.append(f"{name}={value!r}: --{flag} must be {wanted} ({why})")
    number, ranks = config.num_moe_experts, config.expert_model_parallel_size
    if number % ranks:
        found.append(f"{number} experts do not divide over --expert-model-parallel-size {ranks}")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        found.append("experts with tensor parallelism: pass --sequence-parallel too")
    if found:
        raise UnsupportedError("dynaflow_train cannot schedule these experts. " + "; ".join(found))


def check_experts(model: torch.nn.Module, layers: list[torch.nn.Module]) -> None:
    """Refuse experts that we would compute otherwise than the host; a dense model passes.

    Raises:
        UnsupportedError: as `check_settings`; modules of a kind that is not replaced.
    """
    inside = [m for layer in layers for m in layer.modules() if isinstance(m, MoELayer)]
    if not inside and any(isinstance(m, MoELayer) for m in model.modules()):
        raise UnsupportedError(
            f"the experts stand outside of the layers ({type(layers[0]).__name__}): layers of "
            "several classes (HybridModel) are not known; build the model as GPTModel"
        )
    for moe in inside:
        check_settings(moe.config)
        experts = list[Any](getattr(moe.experts, "local_experts", ()))
        parts = [(moe, MoELayer), (moe.router, TopKRouter), (moe.experts, SequentialMLP)]
        parts += [(expert, MLP) for expert in experts]
        parts += [(getattr(e, "linear_fc1", None), ColumnParallelLinear) for e in experts]
        parts += [(getattr(e, "linear_fc2", None), RowParallelLinear) for e in experts]
        for part, kind in parts:
            if type(part) is not kind:
                raise UnsupportedError(
                    f"experts are captured where a {kind.__name__} stands, found "
                    f"{type(part).__name__}: build the model by get_gpt_layer_local_spec"
                )
