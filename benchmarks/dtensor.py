"""A baseline: torch's own sequence parallelism by DTensor, torch.compile for each layer, async TP.

The layers, weights and cut are those of the other variants; who shards them is torch's
`parallelize_module`. Async TP is Inductor's pass `_micro_pipeline_tp`, which puts
`symm_mem.fused_all_gather_matmul` and `symm_mem.fused_matmul_reduce_scatter` in place of a
collective and its product; whether it did is read from the code that Inductor wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._inductor.codecache import PyCodeCache
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dynaflow_train import api
from dynaflow_train.benchmarks.models import build
from dynaflow_train.benchmarks.steps import PlainStep
from dynaflow_train.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor

    from dynaflow_train.benchmarks.steps import Batch, Clock, Stamps

NAME, ASYNC = "dtensor_sp", "+async_tp"
_FUSED = re.compile(r"symm_mem\.(fused_all_gather_matmul|fused_matmul_reduce_scatter)")


class DTensorStep(PlainStep):
    """A step of DTensors, which says how often async TP stands in what was compiled."""

    def __init__(
        self, model: torch.nn.Module, batch: Batch, clock: Clock, *, pipelined: bool
    ) -> None:
        super().__init__(model, batch, clock)
        self.pipelined = pipelined
        self._before = _loaded()
        self._fused: Counter[str] | None = None

    def __call__(self) -> Stamps:
        """Issue one step; the first compiles, and is looked at while its code is there."""
        stamps = super().__call__()
        if self._fused is None:
            self._fused = fused_calls(_loaded() - self._before)
        return stamps

    def gradients(self) -> list[Tensor]:
        """Local shards; what torch leaves as summands (of norms' weights) is summed."""
        self()
        tensors = (*self.batch.inputs.values(), *self.parameters)
        return [_like(t.grad, t) for t in tensors if t.grad is not None]

    @property
    def says(self) -> str:
        """Whether the pass applied."""
        if not self.pipelined:
            return ""
        if not self._fused:
            return "async TP not applied: the compiled code holds no fused product"
        calls = ", ".join(f"{name} {n}" for name, n in sorted(self._fused.items()))
        return f"async TP applied, in the code that all layers share: {calls}"


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and isinstance(tensor, DTensor):
        return gradient.redistribute(placements=tensor.placements).to_local()
    return gradient


def _loaded() -> set[str]:
    """Files of the code that Inductor has loaded in this process."""
    return {path for module in PyCodeCache.modules if (path := getattr(module, "__file__", None))}


def fused_calls(paths: Iterable[str]) -> Counter[str]:
    """Fused products in that code, by name."""
    found: Counter[str] = Counter()
    for path in paths:
        found.update(m[1] for m in _FUSED.finditer(Path(path).read_text(encoding="utf-8")))
    return found


def step(bed: Any, *, pipelined: bool) -> PlainStep:
    """The baseline, with async TP or without."""
    if bed.case.tokens % bed.mesh.size():
        raise UnsupportedError(
            f"DTensor's sequence parallelism needs a number of tokens divisible by "
            f"{bed.mesh.size()}, found {bed.case.tokens}"
        )
    ranks = bed.mesh.size()
    model = build(bed.case, bed.device, bed.dtype, cut=bed.case.cut(ranks) // ranks)
    layers = api.layers_of(model)[1]
    for layer in layers:
        parallelize_module(layer, bed.mesh, _plan())
    bed.watch(model)
    part, whole = Shard(1), Replicate()  # the first cuts along the sequence, the last joins
    cut = PrepareModuleInput(
        input_layouts=(whole,), desired_input_layouts=(part,), use_local_output=True
    )
    join = PrepareModuleOutput(output_layouts=(part,), desired_output_layouts=(whole,))
    parallelize_module(layers[0], bed.mesh, cut)
    parallelize_module(layers[-1], bed.mesh, join)
    options: dict[str, Any] = {"_micro_pipeline_tp": True} if pipelined else {}
    if pipelined:
        # Deprecated, and still what the pass looks for in torch 2.11.
        enable: Any = getattr(symmetric_memory, "enable_symm_mem_for_group")  # noqa: B009
        enable(bed.mesh.get_group().group_name)
    for layer in layers:
        if bed.executor == "inductor":
            layer.compile(backend="inductor", options=options)
        else:
            layer.compile(backend="aot_eager")
    return DTensorStep(model, bed.batch, bed.clock, pipelined=pipelined)


def _plan() -> dict[str, Any]:
    """Of one layer: norms on a part of the sequence, blocks on all of it."""
    part, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
    }
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {n: RowwiseParallel(output_layouts=part) for n in ("self_attn.o_proj", "mlp.down_proj")}
    return plan
