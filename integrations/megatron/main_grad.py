"""Weight gradients are added straight to Megatron's `main_grad`: `--gradient-accumulation-fusion`.

Host seams (megatron-core 0.19.2): `core/distributed/distributed_data_parallel.py`, whose hooks add
a parameter's `.grad` to `main_grad` unless `grad_added_to_main_grad` says that it is there, and
with `--overlap-grad-reduce` want some `.grad` all the same; `core/tensor_parallel/layers.py`, which
does so with a kernel of Apex's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class MainGrads:
    """Megatron's totals.

    Attributes:
        enabled: False leaves gradients to autograd.
    """

    enabled: bool = True
    _told: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])

    def find(self, parameter: Tensor) -> Tensor | None:
        """The parameter's `main_grad`, once data parallelism has made one.

        None for a parameter whose gradient must reach Megatron's hook as it is (`zero_out_wgrad`:
        an embedding that is shared over pipeline stages).
        """
        known = hasattr(parameter, "grad_added_to_main_grad")
        if not (self.enabled and known) or getattr(parameter, "zero_out_wgrad", False):
            return None
        return getattr(parameter, "main_grad", None)

    def added(self, parameter: Any) -> Tensor:
        """Tells the hook; autograd gets memory that all parameters of a shape share, never read."""
        parameter.grad_added_to_main_grad = True
        key = (parameter.shape, parameter.dtype, parameter.device)
        if key not in self._told:
            self._told[key] = torch.empty_like(parameter, requires_grad=False)
        # Another tensor on it each time: autograd copies a gradient that somebody else holds.
        return self._told[key].detach()
