"""Copies of a sharded model, each with tokens of its own: gradients are averaged over them.

As DistributedDataParallel does it, without buckets: each gradient travels as soon as autograd has
it, beside what is left of the backward. The same for all variants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor, nn


class Averages:
    """Of one group.

    Attributes:
        group: the ranks that hold the same shard.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._works: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Average the gradients of all parameters."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._start)

    def _start(self, parameter: Tensor) -> None:
        gradient: Any = parameter.grad
        local = getattr(gradient, "_local_tensor", gradient)
        local.div_(self.group.size())
        self._works.append(dist.all_reduce(local, group=self.group, async_op=True))

    def finish(self) -> None:
        """Wait for all that travels (on CUDA, the stream does)."""
        for work in self._works:
            work.wait()
        self._works.clear()
