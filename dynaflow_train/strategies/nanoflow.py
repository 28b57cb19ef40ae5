"""Micro-batches of chosen sizes, and a stream for each resource: compute, memory, interconnect.

Norms and additions of one micro-batch run beside the matrix products of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.strategies.dual_batch import DualBatch

if TYPE_CHECKING:
    from dynaflow_train.strategy import ReadyOp, Scheduler


@dataclass(frozen=True)
class NanoFlow(DualBatch):
    """Several micro-batches over three streams.

    Args:
        sizes: samples in each micro-batch, in place of `micro_batches` even ones; they must add up
            to the batch.
    """

    sizes: tuple[int, ...] = ()

    name: ClassVar[str] = "nanoflow"

    @property
    def most_micro_batches(self) -> int:
        """As many as it is told."""
        return len(self.sizes) or self.micro_batches

    def split(self, s: Scheduler) -> None:
        """Cut the batch."""
        s.split(self.sizes or self.micro_batches)

    def stream(self, op: ReadyOp) -> str | None:
        """One lane a resource."""
        return "memory" if op.kind == "memory" else None
