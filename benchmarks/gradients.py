"""A step's gradients against the unsplit run: the whole model on one rank, in a wider dtype.

What is allowed is twice what the whole model in the step's own dtype is off by, and the rounding of
a sum over the ranks. Relative, by norm, of every tensor by itself, on each rank's own part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynaflow_train.benchmarks.steps import PlainStep
    from dynaflow_train.benchmarks.variants import Bed

INPUT = "input"
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def unsplit(bed: Bed, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> gradient of the whole model in a dtype, weights as rounded for the others.

    All ranks must call it: where they have other tokens, what they share is averaged.
    """
    model = bed.whole(dtype)
    given = bed.batch.inputs["inputs_embeds"].detach().to(dtype).requires_grad_()
    output: Any = model(inputs_embeds=given)
    output.last_hidden_state.backward(bed.batch.gradient.to(dtype))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in found.items():
        for group in bed.averaged(name):
            dist.all_reduce(gradient.div_(group.size()), group=group)
    assert given.grad is not None
    return {INPUT: given.grad, **found}


def part(whole: Tensor, like: Tensor) -> Tensor:
    """A rank's own part of a tensor that is cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    shape, start = compute_local_shape_and_global_offset(
        tuple(whole.shape), like.device_mesh, like.placements
    )
    for dim, (size, at) in enumerate(zip(shape, start, strict=True)):
        whole = whole.narrow(dim, at, size)
    return whole.clone()


@dataclass(frozen=True)
class Reference:
    """This rank's parts of the unsplit gradients.

    Attributes:
        truth: name -> part, in the wider dtype.
        plain: name -> how far the whole model in the step's own dtype is off.
        rounding: what a sum over the ranks may add.
    """

    truth: Mapping[str, Tensor]
    plain: Mapping[str, float]
    rounding: float

    def wrong(self, found: Sequence[Tensor]) -> str:
        """What is wrong with a step's gradients, in the order of `truth`; "" if nothing is."""
        if len(found) != len(self.truth):
            return f"gradients are wrong: {len(found)} instead of {len(self.truth)}"
        for (name, truth), gradient in zip(self.truth.items(), found, strict=True):
            allowed = 2 * self.plain[name] + self.rounding
            if not (error := off(gradient, truth)) <= allowed:
                return (
                    f"gradients are wrong: {name} is off by {error:.2g} of the unsplit run's norm, "
                    f"allowed are {allowed:.2g}"
                )
        return ""


def off(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    if found.shape != truth.shape:
        return float("inf")
    scale = truth.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.to(truth.dtype) - truth).norm() / scale)


def reference(bed: Bed, eager: PlainStep) -> Reference:
    """For the steps of a bed, whose tensors are cut as eager's."""
    eager()
    named = [(INPUT, bed.batch.inputs["inputs_embeds"]), *eager.model.named_parameters()]
    cut = {name: tensor.detach() for name, tensor in named if tensor.grad is not None}
    eager.forget()
    plain, truth = (
        {name: part(each, cut[name]) for name, each in unsplit(bed, dtype).items()}
        for dtype in (bed.dtype, WIDER[bed.dtype])
    )
    truth = {name: truth[name] for name in cut}
    errors = {name: off(plain[name], each) for name, each in truth.items()}
    return Reference(truth, errors, 2 * torch.finfo(bed.dtype).eps * dist.get_world_size() ** 0.5)
