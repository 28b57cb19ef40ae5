"""Micro-batches in turn: the collective of one runs beside the compute of the others.

Across layers, in regions that cover several. In the backward wgrads fill in where every dgrad waits
for a collective.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynaflow_train.strategies.comm_overlap import CommOverlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.strategy import ReadyOp, Scheduler


@dataclass(frozen=True)
class DualBatch(CommOverlap):
    """CommOverlap over two micro-batches, or more.

    Args:
        micro_batches: how many.
        merge_wgrads: run each wgrad once for all micro-batches instead of once for each.
    """

    micro_batches: int = 2
    merge_wgrads: bool = False

    @property
    def most_micro_batches(self) -> int:
        """As many as it is told."""
        return self.micro_batches

    def split(self, s: Scheduler) -> None:
        """Cut the batch."""
        s.split(self.micro_batches)

    def ready(self, s: Scheduler) -> Sequence[ReadyOp]:
        """What may be picked: a wgrad that runs merged only once all micro-batches have it."""
        ready = s.get_ready_ops()
        if not self.merge_wgrads:
            return ready
        whole = {name for name, n in Counter(op.op for op in ready).items() if n == len(s.sizes)}
        alone = (op for op in ready if op.micro_batch is None or not op.is_mergeable)
        whole |= {op.op for op in alone}
        return [op for op in ready if not op.is_wgrad or op.op in whole]

    def together(self, op: ReadyOp, ready: Sequence[ReadyOp]) -> Sequence[ReadyOp]:
        """What is launched when `op` is picked."""
        if not (self.merge_wgrads and op.is_wgrad and op.is_mergeable):
            return (op,)
        return [each for each in ready if each.op == op.op]
