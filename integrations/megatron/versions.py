"""Which Megatron, and which of its settings, a captured layer can stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import __version__ as found_version

from dynaflow_train.errors import UnsupportedError

from .moe_settings import check_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

KNOWN = ("0.19.2",)

# Field of TransformerConfig -> (values that are refused, Megatron's flag, why).
_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "tp_comm_overlap": (
        bool,
        "leave --tp-comm-overlap out",
        "TransformerEngine's userbuffers overlap inside its own linears, which are not captured",
    ),
    "overlap_moe_expert_parallel_comm": (
        bool,
        "leave --overlap-moe-expert-parallel-comm out",
        "it runs the parts of a layer by itself and never calls the layer",
    ),
    "delay_wgrad_compute": (bool, "leave --delay-wgrad-compute out", "the strategy delays wgrads"),
    "context_parallel_size": (
        lambda n: n > 1,
        "pass --context-parallel-size 1",
        "its attention exchanges keys outside the graph",
    ),
    "fp8": (bool, "leave --fp8-format out", "its scales are TransformerEngine's"),
    "fp4": (bool, "leave --fp4-format out", "its scales are TransformerEngine's"),
    "cpu_offloading": (bool, "leave --cpu-offloading out", "its hooks move tensors inside a layer"),
    "fine_grained_activation_offloading": (
        bool,
        "leave --fine-grained-activation-offloading out",
        "its hooks move tensors inside a layer",
    ),
    "cuda_graph_impl": (
        lambda value: value not in (0, "none"),
        "pass --cuda-graph-impl none",
        "a captured layer cannot be captured again",
    ),
    "recompute_granularity": (
        lambda value: value == "selective",
        "pass --recompute-granularity full, or none",
        "its checkpoints lie inside a layer; a region is recomputed whole",
    ),
}


def check_version() -> None:
    """Refuse a megatron-core whose seams we have not read.

    Raises:
        UnsupportedError: it is none of `KNOWN`.
    """
    version = found_version.partition("+")[0]
    if version not in KNOWN:
        raise UnsupportedError(
            f"dynaflow_train knows megatron-core {', '.join(KNOWN)}, found {version}: "
            f"pip install megatron-core=={KNOWN[-1]}"
        )


def check_config(config: Any) -> None:
    """Refuse a TransformerConfig that asks for what a captured layer does not do.

    Raises:
        UnsupportedError: names every setting, the flag that sets it, and why.
    """
    found = [
        f"{field}={value!r}: {flag} ({why})"
        for field, (refused, flag, why) in _REFUSED.items()
        if refused(value := getattr(config, field, None) or 0)
    ]
    if found:
        raise UnsupportedError("dynaflow_train cannot schedule this model. " + "; ".join(found))


def check_recomputation(config: Any, region: str) -> None:
    """Refuse full recomputation where it would change gradients or has nothing to hold on to.

    Args:
        config: a TransformerConfig, or Megatron's arguments.
        region: of the recipe.

    Raises:
        UnsupportedError: the whole stack is one region, or the layers draw dropout or hold experts.
    """
    if config.recompute_granularity != "full":
        return
    if region == "model":
        raise UnsupportedError(
            "--recompute-granularity full recomputes layer by layer, the region is the whole "
            "stack: pass --dynaflow-region layer (region: layer)"
        )
    if getattr(config, "num_moe_experts", None):
        raise UnsupportedError(
            "--recompute-granularity full with experts: leave it out; the forward runs plain, its "
            "recomputation scheduled, and rounding may send a token to another expert"
        )
    if config.hidden_dropout or config.attention_dropout:
        raise UnsupportedError(
            f"--recompute-granularity full with dropout (hidden {config.hidden_dropout}, attention "
            f"{config.attention_dropout}): the forward runs plain, its recomputation scheduled, "
            "and each draws its own masks; pass --hidden-dropout 0 --attention-dropout 0"
        )


def check_model(model: torch.nn.Module, layers: list[torch.nn.Module]) -> None:
    """Refuse a model that cannot be captured.

    Raises:
        UnsupportedError: it has no transformer layers, a setting that is refused, or modules of
            TransformerEngine or Apex inside a layer.
    """
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} holds no transformer layers")
    check_config(getattr(layers[0], "config", None))
    check_experts(model, layers)
    foreign = ("transformer_engine", "megatron.core.extensions", "apex")
    for name, module in layers[0].named_modules():
        where = type(module).__module__
        if where.startswith(foreign):
            raise UnsupportedError(
                f"layer module {name!r} is {where}.{type(module).__name__}, whose kernels and "
                f"communication cannot be traced: pass --transformer-impl local"
            )
