"""Micro-batches in turn: the collective of one runs beside the compute of the other.

Across layers, in regions that cover several. In the backward the wgrads fill in where every dgrad
waits for a collective: none is kept longer than one block, so memory stays that of the plain run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaflow_train.annotate import Rule, SplitModule
from dynaflow_train.strategy import MicroBatch, ReadyOp, Scheduler, Strategy


@dataclass(frozen=True)
class DualBatch(Strategy):
    """Two micro-batches (or more), each advancing while the others communicate.

    Args:
        micro_batches: how many.
        min_tokens: below as many tokens on this rank the plan is sequential.
        merge_wgrads: run the wgrad of all micro-batches once instead of once for each.
    """

    micro_batches: int = 2
    min_tokens: int = 0
    merge_wgrads: bool = False

    rules: ClassVar[tuple[Rule, ...]] = (
        SplitModule("*.self_attn|*.self_attention|*.attention|*.attn", optional=True),
        SplitModule("*.mlp|*.feed_forward|*.ffn", optional=True),
    )

    @property
    def most_micro_batches(self) -> int:
        """As many as it is told."""
        return self.micro_batches

    def schedule(self, s: Scheduler) -> None:
        """The most urgent ready op, again and again."""
        if s.context.tokens < self.min_tokens:
            return s.sequential(f"{s.context.tokens} tokens < min_tokens={self.min_tokens}")
        self.split(s)
        last: MicroBatch | None = None
        while ready := s.get_ready_ops():
            op = min(ready, key=lambda op: self.urgency(s, op, last))
            if not op.is_wgrad:
                last = op.micro_batch
            whole = self.together(s, op)
            s.execute(whole or op, stream=self.stream(op))
        return None

    def split(self, s: Scheduler) -> None:
        """Cut the batch."""
        s.split(self.micro_batches)

    def stream(self, op: ReadyOp) -> str | None:
        """The lane of `op`; None is the default: "comm" for collectives, else "compute"."""
        return None

    def together(self, s: Scheduler, op: ReadyOp) -> tuple[ReadyOp, ...]:
        """With `merge_wgrads`: the wgrad `op` of every micro-batch, if all are ready."""
        if not (self.merge_wgrads and op.is_wgrad):
            return ()
        same = tuple(each for each in s.get_ready_ops() if each.op == op.op)
        return same if len(same) == len(s.sizes) else ()

    def urgency(self, s: Scheduler, op: ReadyOp, last: MicroBatch | None) -> tuple[int, int, bool]:
        """The smaller, the sooner; equals keep the region's order.

        Collectives; then what waits for none, first of the micro-batch that ran last; then wgrads;
        then what reads the collective that has been under way longest.
        """
        if op.is_communication:
            return (0, 0, False)
        if op.is_wgrad:
            return (4 if self.merge_wgrads and not self.together(s, op) else 2, 0, False)
        waits_for = s.waits_for(op)
        if waits_for is None:
            return (1, 0, op.micro_batch != last)
        return (3, waits_for, False)
