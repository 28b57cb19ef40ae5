"""One step of a model: everything it gives, by name, and how far that is from the truth."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[Tensor, ...]


def leaves(value: object) -> list[Tensor]:
    """All tensors of nested outputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in leaves(part)] if isinstance(value, list | tuple) else []


def weighted(outputs: object) -> Tensor:
    """A loss in which every element of every floating output counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for out in leaves(outputs):
        if out.is_floating_point():
            weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64) + 1).view(out.shape)
            total = total + (out.double() * weight).sum() / math.sqrt(out.numel())
    return total


@dataclass(frozen=True)
class Result:
    """One step: loss, outputs, gradients of parameters and inputs, buffers, all by name."""

    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def errors(self, truth: Result) -> dict[str, float]:
        """|ours - true| / |true| of each tensor, by norms; infinite when shapes differ.

        A tensor that nearly cancels (a bias before a normalisation) is measured by a tenth of what
        is usual among its kind.
        """
        assert self.tensors.keys() == truth.tensors.keys()
        sizes = {k: v.double().norm().item() for k, v in truth.tensors.items()}
        found = {}
        for name, wanted in truth.tensors.items():
            kind = [s for n, s in sizes.items() if n.split()[0] == name.split()[0]]
            size = max(sizes[name], 0.1 * statistics.median(kind), 1e-9)
            ours = self.tensors[name]
            alike = ours.shape == wanted.shape
            off = (ours.double() - wanted.double()).norm().item() if alike else math.inf
            found[name] = off / size
        return found


def step(model: nn.Module, inputs: Inputs, loss: Callable[[object], Tensor] = weighted) -> Result:
    """Forward, backward; gradients are those of this step alone, buffers are put back."""
    model.zero_grad(set_to_none=True)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    given = [
        x.detach().clone().requires_grad_(x.is_floating_point() and not _is_state(model, i))
        if isinstance(x, Tensor)
        else x
        for i, x in enumerate(inputs)
    ]
    outputs = model(*given)
    total = loss(outputs)
    total.backward()
    found = {"loss": total.detach()}
    found.update({f"output {i}": t.detach().clone() for i, t in enumerate(leaves(outputs))})
    found.update({f"input {i}": x.detach() for i, x in enumerate(given) if isinstance(x, Tensor)})
    found.update(
        {
            f"gradient of input {i}": x.grad
            for i, x in enumerate(given)
            if isinstance(x, Tensor) and x.grad is not None
        }
    )
    found.update(
        {
            f"gradient of {n}": p.grad.clone()
            for n, p in model.named_parameters()
            if p.grad is not None
        }
    )
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return Result(found)


def _is_state(model: nn.Module, index: int) -> bool:
    """Whether an input is a state that the model writes to, which cannot want a gradient."""
    return type(model).__name__ == "Attached" and index == 1


def cast(value: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating tensors in another dtype."""
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in value
    )
