"""Collectives beside independent compute, without cutting the batch.

In the backward of a tensor-parallel layer the all-reduce of a block's dgrad runs beside the wgrads
that were ready before it; in the forward only branches of the graph can hide a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaflow_train.annotate import Rule, SplitModule
from dynaflow_train.strategy import ReadyOp, Scheduler, Strategy


@dataclass(frozen=True)
class CommOverlap(Strategy):
    """Issues collectives first, what leads to the next one second, wgrads while one is under way.

    Args:
        min_tokens: below as many tokens on this rank the plan is sequential.
    """

    min_tokens: int = 0

    rules: ClassVar[tuple[Rule, ...]] = (
        SplitModule("*.self_attn|*.self_attention|*.attention|*.attn", optional=True),
        SplitModule("*.mlp|*.feed_forward|*.ffn", optional=True),
    )

    @property
    def most_micro_batches(self) -> int:
        """It never cuts."""
        return 1

    def schedule(self, s: Scheduler) -> None:
        """The most urgent ready op, again and again."""
        if s.context.tokens < self.min_tokens:
            return s.sequential(f"{s.context.tokens} tokens < min_tokens={self.min_tokens}")
        while ready := s.get_ready_ops():
            s.execute(min(ready, key=lambda op: self.urgency(s, op)))
        return None

    def urgency(self, s: Scheduler, op: ReadyOp) -> int:
        """The smaller, the sooner; equals keep the region's order."""
        if op.is_communication:
            return 0
        if op.is_wgrad:
            return 2
        return 1 if s.waits_for(op) is None else 3
