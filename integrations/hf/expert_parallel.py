"""Expert parallelism for transformers: dropless, by all-to-alls that the engine may overlap.

Host seams: `transformers/distributed/expert_parallel.py` (newest) `EPImplementationInterface`,
`EPImplementation`; `transformers/distributed/tensor_parallel.py` `ALL_PARALLEL_STYLES` (5.17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.experts import define, grouped_linear, run_experts

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "dynaflow"


def check_experts(experts: nn.Module) -> None:
    """Refuse experts that we would compute otherwise than the host.

    Raises:
        UnsupportedError: no gated pair of stacked weights, or biases.
    """
    known = all(hasattr(experts, name) for name in ("gate_up_proj", "down_proj", "_apply_gate"))
    if not known or getattr(experts, "has_bias", False) or not getattr(experts, "has_gate", True):
        raise UnsupportedError(
            f"{type(experts).__name__}: dynaflow_train runs experts of stacked gate_up_proj and "
            f"down_proj without biases (Mixtral, Qwen3-MoE); found parameters "
            f"{', '.join(n for n, _ in experts.named_parameters())}. Use ep_implementation='auto'."
        )


def compute(experts: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """The experts on rows sorted by expert."""
    flipped = bool(getattr(experts, "is_transposed", False))
    rows = grouped_linear(rows, experts.gate_up_proj, ends, transposed=flipped)
    return grouped_linear(experts._apply_gate(rows), experts.down_proj, ends, transposed=flipped)


def apply() -> Callable[[], None]:
    """Register `ep_implementation="dynaflow"`; the result takes it out again."""
    from transformers.distributed.expert_parallel import (
        EPImplementation,
        EPImplementationInterface,
    )

    define()

    class DynaFlowEP(EPImplementation):
        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            check_experts(experts)
            self.experts = experts
            self.ranks = (ep_mesh.get_group().group_name, ep_mesh.size())

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return run_experts(
                hidden_states,
                top_k_index,
                top_k_weights,
                lambda rows, ends: compute(self.experts, rows, ends),
                self.ranks,
                self.num_local_experts,
            )

    EPImplementationInterface.register(NAME, DynaFlowEP)

    def undo() -> None:
        EPImplementationInterface._global_mapping.pop(NAME, None)

    return undo
