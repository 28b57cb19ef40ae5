"""Expert parallelism for transformers: dropless, by all-to-alls that the engine may overlap.

Every rank has its own tokens, all of the model but the experts, and `num_experts / ep_size` of the
experts of each layer.

Host seams: `transformers/distributed/tensor_parallel.py` `ALL_PARALLEL_STYLES`, `MoEParamShard`
(5.17 to 5.x); `transformers/distributed/expert_parallel.py` `EPImplementationInterface` (newest).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.experts import define, grouped_linear, run_experts
from dynaflow_train.integrations.hf.tensor_parallel import check_version, local_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

NAME = "dynaflow"  # of the EP implementation
EXPERTS, SHARD = "dynaflow_experts", "grouped_gemm"
HOST_STYLES = ("moe_tp_experts", "ep_dispatch_experts")  # of 5.17, of the newest


class Experts(TensorParallelLayer):
    """Stacked gated experts of which every rank holds some; each rank has its own tokens."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Send each token to the ranks of its experts; [t, h] -> [t, h]."""
        check_experts(module)
        module.forward = forward_of(module, mesh)
        return module


def forward_of(
    experts: Any, mesh: DeviceMesh, reserve: int = 0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts' forward over the ranks of `mesh`: (hidden, index, weights) -> hidden."""
    ranks, local = (mesh.get_group().group_name, mesh.size()), int(experts.num_experts)
    how: dict[str, Any] = {
        "transposed": bool(getattr(experts, "is_transposed", False)),
        "reserve": reserve,
    }

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        rows = grouped_linear(rows, experts.gate_up_proj, ends, **how)
        rows = experts._apply_gate(rows)
        return grouped_linear(rows, experts.down_proj, ends, **how)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with local_parameters(experts):
            return run_experts(hidden_states, top_k_index, top_k_weights, compute, ranks, local)

    return forward


def check_experts(experts: nn.Module) -> None:
    """Refuse experts that we would compute otherwise than the host.

    Raises:
        UnsupportedError: no stacked gate_up_proj and down_proj, or biases.
    """
    found = [name for name, _ in experts.named_parameters()]
    if found != ["gate_up_proj", "down_proj"] or not hasattr(experts, "_apply_gate"):
        msg = (
            f"{type(experts).__name__} has parameters {', '.join(found)}; dynaflow_train runs "
            f"experts of stacked gate_up_proj and down_proj without biases (Mixtral, Qwen3-MoE). "
            f"Use the host's own expert parallelism"
        )
        raise UnsupportedError(msg)


def check_alone(ep_size: int, tp_size: int) -> None:
    """Refuse experts over ranks beside layers over ranks.

    Raises:
        UnsupportedError: both sizes are above 1.
    """
    if tp_size > 1 and ep_size > 1:
        msg = f"expert_parallel {ep_size} and tensor parallelism over {tp_size} ranks exclude each"
        raise UnsupportedError(f"{msg} other: leave one out")


def apply() -> Callable[[], None]:
    """Register our style, and `ep_implementation="dynaflow"` where transformers has such; undo.

    Raises:
        UnsupportedError: transformers is older than 5.17 or newer than 5.x.
    """
    check_version()
    define()
    style: Any = Experts()
    ALL_PARALLEL_STYLES.register(EXPERTS, style)
    try:
        host: Any = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:  # 5.17
        host = None
    if host is not None:
        host.EPImplementationInterface.register(NAME, _implementation(host))

    def undo() -> None:
        type(ALL_PARALLEL_STYLES)._global_mapping.pop(EXPERTS, None)
        if host is not None:
            host.EPImplementationInterface._global_mapping.pop(NAME, None)

    return undo


def _implementation(host: Any) -> type:
    class DynaFlowEP(host.EPImplementation):
        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            check_experts(experts)
            if tp_mesh.size() > 1:
                msg = (
                    f"ep_implementation={NAME!r} needs other tokens on every rank; found tp_size="
                    f"{tp_mesh.size()}, whose ranks share a batch. Set tp_size=1, or use 'auto'"
                )
                raise UnsupportedError(msg)
            self.forward = forward_of(experts, ep_mesh)

        def __call__(self, *arguments: Tensor) -> Tensor:
            return self.forward(*arguments)

    return DynaFlowEP


def parallelize(model: PreTrainedModel, ep_size: int, sm_reserve: int = 0) -> PreTrainedModel:
    """Share each layer's experts over `ep_size` ranks, in place; all else stays whole.

    The ranks must hold equal weights. Each has its own tokens: average the gradients of all other
    parameters over the ranks, as DistributedDataParallel does (it leaves the experts alone: see
    `_ddp_params_and_buffers_to_ignore`). The experts' gradients are averages already. Their
    products leave `sm_reserve` SMs to the all-to-alls beside them (`rows.sms_left`).

    Raises:
        UnsupportedError: no experts, experts that do not divide by `ep_size` or of another form,
            or other than `ep_size` processes.
    """
    check_version()
    define()
    if dist.get_world_size() != ep_size:
        msg = f"experts over ep_size={ep_size}, found {dist.get_world_size()} processes"
        raise UnsupportedError(f"{msg}: start as many processes as ep_size, or change it")
    mesh = init_device_mesh(next(model.parameters()).device.type, (ep_size,))
    plan: dict[str, str] = getattr(model.config, "base_model_ep_plan", None) or {}
    ends = tuple(k.rpartition("*")[2] for k, style in plan.items() if style in HOST_STYLES)
    found: list[tuple[str, Any]]
    found = [(name, each) for name, each in model.named_modules() if name.endswith(ends or "?")]
    if not found:
        msg = f"{type(model).__name__} has no expert-parallel plan: its experts cannot be shared"
        raise UnsupportedError(msg)
    shard, ignored = ALL_PARALLEL_STYLES[SHARD], []
    for name, experts in found:
        check_experts(experts)
        number = int(experts.num_experts)
        if number % ep_size:
            msg = f"{name}: {number} experts do not divide over ep_size={ep_size} ranks"
            raise UnsupportedError(f"{msg}. Use a divisor of {number}")
        for key in ("gate_up_proj", "down_proj"):
            shard.shard_param(experts, key, mesh)
            experts._parameters[key].register_hook(lambda gradient: gradient / ep_size)
            ignored.append(f"{name}.{key}")
        experts.forward = forward_of(experts, mesh, sm_reserve)
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    return model
