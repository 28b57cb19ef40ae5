"""Mixture of experts over ranks, dropless: Megatron's router, all-to-alls that the engine overlaps.

Host seams (megatron-core 0.19.2): `core/transformer/moe/moe_layer.py` `MoELayer.forward`, whose
dispatcher reads sizes on the host and whose `SequentialMLP` (`core/transformer/moe/experts.py`)
loops over experts; beside them `moe_utils.py` `MoEAuxLossAutoScaler.backward`, which reads a scale
from a class, and `moe_logging.py` `MoEMetricsTracker.record`, which indexes by the
layer's number, so that each layer would be a graph of its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.fx.traceback import annotate

from dynaflow_train.annotate import BACKWARD
from dynaflow_train.integrations.experts import define, run_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GroupedLinear(torch.autograd.Function):
    """Each expert's rows times its weight [out, in], the weights one by one.

    Nothing but the parameters is kept of the weights: the backward stacks them again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(rows, ends, *weights)
        return torch.ops.dynaflow.grouped_mm(rows, torch.stack(weights), ends, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        rows, ends, *weights = ctx.saved_tensors
        ops, (gradient,) = torch.ops.dynaflow, gradients
        with annotate({BACKWARD: True}):  # in another shape than in the forward, so that it is run
            stacked = torch.stack([weight.t() for weight in weights]).transpose(1, 2)
        of_rows = ops.grouped_mm(gradient, stacked, ends, True)
        of_weights = ops.grouped_wgrad(gradient, rows, ends)
        return of_rows, None, *(of_weights[i] for i in range(len(weights)))


def replacement(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The host's `forward`: [s, b, h] -> ([s, b, h], no bias); outside a capture it is `plain`."""

    @functools.wraps(plain)
    def forward(
        self: Any, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        if not torch.compiler.is_compiling():
            return plain(self, hidden_states, intermediate_tensors, padding_mask)
        return _traced(self, hidden_states, padding_mask), None

    return forward


def _traced(self: Any, hidden: Tensor, padding: Tensor | None) -> Tensor:
    shared = self.shared_experts(hidden) if self.use_shared_expert else None
    mask = None if padding is None else padding.transpose(0, 1).bool()
    chances, chosen = self.router(hidden, mask)
    index = chosen.int().topk(self.router.topk, dim=1).indices
    ranks = (self.ep_group.group_name, self.ep_group.size())
    compute = functools.partial(_experts, self.experts)
    tokens = hidden.flatten(0, 1)
    weights = chances.gather(1, index)
    out = run_experts(tokens, index, weights, compute, ranks, self.num_local_experts)
    out = out.view(hidden.shape)
    return out if shared is None else out + shared


def _experts(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    config, each = experts.config, experts.local_experts
    rows = GroupedLinear.apply(rows, ends, *(e.linear_fc1.weight for e in each))
    gate, *up = rows.chunk(2, dim=-1) if config.gated_linear_unit else (rows,)
    rows = config.activation_func(gate) * up[0] if up else config.activation_func(gate)
    return GroupedLinear.apply(rows, ends, *(e.linear_fc2.weight for e in each))


def define_scale() -> torch.library.Library:
    """Define `dynaflow::auxiliary_scale`, and the rows' operators; it goes with the result.

    It gives what the host multiplies gradients of auxiliary losses with when it runs, which may
    have been set since the forward.
    """
    define()
    library = torch.library.Library("dynaflow", "FRAGMENT")
    library.define("auxiliary_scale(Tensor loss) -> Tensor")

    def read(loss: Tensor) -> Tensor:
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return torch.ones_like(loss) if scale is None else scale.to(loss).reshape(loss.shape)

    library.impl("auxiliary_scale", read, "CompositeExplicitAutograd")
    torch.library.register_fake("dynaflow::auxiliary_scale", torch.empty_like, lib=library)
    return library


def scaled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The host's `MoEAuxLossAutoScaler.backward`, which reads the scale when it runs."""

    @functools.wraps(plain)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            return plain(ctx, gradient)
        (loss,) = ctx.saved_tensors
        with annotate({BACKWARD: True}):
            scale = torch.ops.dynaflow.auxiliary_scale(loss)
        return gradient, scale

    return backward


def recorded(plain: Callable[..., None]) -> Callable[..., None]:
    """The host's `MoEMetricsTracker.record`; traced, after `number_layers` and `prepare`."""

    @functools.wraps(plain)
    def record(
        self: Any, name: str, value: Tensor, layer_number: Any, num_layers: int, **how: Any
    ) -> None:
        if not torch.compiler.is_compiling():
            plain(self, name, value, layer_number, num_layers, **how)
            return
        entry = self.metrics[name]
        here = torch.arange(1, num_layers + 1, device=value.device) == layer_number
        entry.values.add_(torch.where(here, value.detach(), 0.0))
        for key, group in how.items():
            setattr(entry, key, group)

    return record


def routers_of(layers: Sequence[torch.nn.Module]) -> list[Any]:
    """The routers of all experts in the layers."""
    return [m.router for layer in layers for m in layer.modules() if isinstance(m, MoELayer)]


def number_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Make the number of each router's layer a tensor, which equal layers' one graph reads."""
    for router in routers_of(layers):
        if isinstance(number := router.layer_number, int):
            del router.layer_number
            tensor = torch.tensor(number, device=router.weight.device)
            router.register_buffer("layer_number", tensor, persistent=False)


def prepare(routers: Sequence[Any]) -> None:
    """What the host does at a router's first call, before a capture sees it: totals, dtypes."""
    tracker, kinds = get_moe_metrics_tracker(), ("", "seq_", "global_")
    for router in routers:
        router._maintain_float32_expert_bias()
        names = [
            f"{k}load_balancing_loss" for k in kinds if router.get_aux_loss_coeff(f"{k}aux_loss")
        ]
        names += [] if router.config.moe_z_loss_coeff is None else ["z_loss"]
        size = router.config.num_layers + (router.config.mtp_num_layers or 0)
        for name in names:
            tracker.ensure_initialized(name, size, router.weight.device)
