"""Micro-batches of chosen sizes, and a stream for each resource: compute, memory, interconnect.

Norms and additions of one micro-batch run beside the matrix products of another. A stream has a pool
of the caching allocator's of its own: what it made for long leaves room that no other stream can use.
So the forward, whose results the backward waits for, keeps to the compute stream unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies.dual_batch import DualBatch

if TYPE_CHECKING:
    from dynaflow_train.strategy import ReadyOp, Scheduler


@dataclass(frozen=True)
class NanoFlow(DualBatch):
    """Several micro-batches over three streams.

    Args:
        sizes: samples in each micro-batch, in place of `micro_batches` even ones; they must add up
            to the batch.
        memory_stream: phases in which ops bound by memory have a stream of their own: `backward`,
            `both` (reserves a third more memory) or `none`.

    Raises:
        RecipeError: another `memory_stream`.
    """

    sizes: tuple[int, ...] = ()
    memory_stream: str = "backward"

    name: ClassVar[str] = "nanoflow"

    def __post_init__(self) -> None:
        """Refuse what would mean nothing."""
        if self.memory_stream not in (phases := ("backward", "both", "none")):
            raise RecipeError(
                f"nanoflow: memory_stream must be one of {', '.join(phases)}, "
                f"found {self.memory_stream!r}"
            )

    @property
    def most_micro_batches(self) -> int:
        """As many as it is told."""
        return len(self.sizes) or self.micro_batches

    def split(self, s: Scheduler) -> None:
        """Cut the batch."""
        s.split(self.sizes or self.micro_batches)

    def stream(self, op: ReadyOp) -> str | None:
        """One lane a resource, where it pays."""
        return "memory" if op.kind == "memory" and self.memory_stream in ("both", op.phase) else None
