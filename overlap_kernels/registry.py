"""The one place where a kernel's name leads to its code.

A kernel stands in for a chain of ops. It is bound to the chain's graph (aten nodes with numbers for
sizes; collectives are followed by their wait) and gives a function over the chain's inputs, or the
reason why it cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import fx

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.dense import Fused, fused_kernels
from dynaflow_train.overlap_kernels.grouped_kernel import GroupedKernel

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.choice import Host

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Kernel(Protocol):
    """What a kernel file offers."""

    @property
    def name(self) -> str:
        """What plans call it."""
        ...

    def can_run(self, graph: fx.GraphModule) -> str | None:
        """None, or why not: dtype, divisibility, P2P, a pattern it does not know."""
        ...

    def bind(self, graph: fx.GraphModule) -> Function:
        """The function that replaces the chain: plain tensors in, plain tensors out."""
        ...


@dataclass
class Registry:
    """Kernels by name."""

    kernels: dict[str, Kernel | Fused] = field(default_factory=dict)

    def add(self, kernel: Kernel | Fused) -> None:
        """Add a kernel.

        Raises:
            KernelError: the name is taken.
        """
        if kernel.name in self.kernels:
            raise KernelError(f"a kernel called {kernel.name!r} is registered already.")
        self.kernels[kernel.name] = kernel

    def find(
        self,
        name: str,
        graph: fx.GraphModule,
        host: Callable[[], Host] | None = None,
        lane: str = "compute",
    ) -> Function:
        """The function of kernel `name` for a chain.

        Args:
            name: of the kernel.
            graph: the chain's.
            host: what a fused kernel needs; without it there is none.
            lane: the stream it runs on.

        Raises:
            KernelError: no such kernel, or it cannot run here; the message says why.
        """
        if name not in self.kernels:
            raise KernelError(f"no kernel {name!r}; there are: {', '.join(sorted(self.kernels))}.")
        kernel = self.kernels[name]
        if isinstance(kernel, Fused):
            if host is None:
                raise KernelError(f"kernel {name!r} needs the ranks of a compiled model.")
            return host().bind(kernel, graph, lane)
        if (why_not := kernel.can_run(graph)) is not None:
            raise KernelError(f"kernel {name!r} cannot run here: {why_not}.")
        return kernel.bind(graph)


@dataclass(frozen=True)
class Plain:
    """The chain itself in plain torch: what every other kernel is compared with."""

    name: str = "plain"

    def can_run(self, graph: fx.GraphModule) -> str | None:
        """Always."""
        return None

    def bind(self, graph: fx.GraphModule) -> Function:
        """Run node by node."""
        forward = graph.forward
        return lambda inputs: forward(*inputs)


def default_registry() -> Registry:
    """All kernels that come with dynaflow_train."""
    every = (Plain(), *fused_kernels(), GroupedKernel())
    return Registry({kernel.name: kernel for kernel in every})
