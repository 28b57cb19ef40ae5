"""Collectives beside independent compute, without cutting the batch.

In the backward of a tensor-parallel layer the all-reduce of a block's dgrad runs beside wgrads; in
the forward only branches of the graph can hide a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.annotate import Rule, SplitModule
from dynaflow_train.strategy import ReadyOp, Scheduler, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dynaflow_train.strategy import MicroBatch


@dataclass(frozen=True)
class CommOverlap(Strategy):
    """Collectives beside wgrads, and beside branches that are ready together.

    Args:
        min_tokens: below as many tokens on this rank the plan is sequential.
        max_wgrads: as many wgrads may wait for a collective to fill in beside; each keeps its
            inputs in memory.
    """

    min_tokens: int = 0
    max_wgrads: int = 8

    rules: ClassVar[tuple[Rule, ...]] = (
        SplitModule("*.self_attn|*.self_attention|*.attention|*.attn", optional=True),
        SplitModule("*.mlp|*.feed_forward|*.ffn", optional=True),
        SplitModule("*.shared_expert|*.shared_experts", optional=True),
    )

    @property
    def most_micro_batches(self) -> int:
        """It never cuts."""
        return 1

    def schedule(self, s: Scheduler) -> None:
        """The most urgent ready op, again and again."""
        if s.context.tokens < self.min_tokens:
            return s.sequential(f"{s.context.tokens} tokens < min_tokens={self.min_tokens}")
        self.split(s)
        copying: set[MicroBatch | None] = set()
        while ready := self.ready(s):
            op = self.pick(s, self.free(ready, copying))
            self.issue(s, op, ready)
            if op.collective == "copy_to_host":
                copying.add(op.micro_batch)
            elif op.kind == "compute" and not op.is_wgrad:
                copying.clear()
        return None

    def issue(self, s: Scheduler, op: ReadyOp, ready: Sequence[ReadyOp]) -> None:
        """Launch what was picked."""
        s.execute(self.together(op, ready), stream=self.stream(op))

    def free(
        self, ready: Sequence[ReadyOp], copying: Collection[MicroBatch | None]
    ) -> Sequence[ReadyOp]:
        """What need not make the host wait.

        An all-to-all of rows makes it wait for their numbers: the device should have been given
        something to compute meanwhile. `copying` are the micro-batches whose numbers are on the way
        since the last compute.
        """
        found = [
            op for op in ready if op.collective != "all_to_all" or op.micro_batch not in copying
        ]
        return ready if all(op.is_wgrad for op in found) else found

    def pick(self, s: Scheduler, ready: Sequence[ReadyOp]) -> ReadyOp:
        """Collectives at once; wgrads where all else would wait; else what leads on soonest.

        Of several collectives the one that can start first: their lane runs them in order.
        """
        wgrads = [op for op in ready if op.is_wgrad]
        others = [op for op in ready if not op.is_wgrad]
        collectives = [op for op in others if op.is_communication]
        if collectives:
            return min(collectives, key=lambda op: s.start_ms(op, self.stream(op)))
        if not others:
            return wgrads[0]
        op = min(others, key=lambda op: self.urgency(s, op))
        fill_in = s.waits_for(op, self.stream(op)) >= 0 or len(wgrads) > self.max_wgrads
        return wgrads[0] if wgrads and fill_in else op

    def urgency(self, s: Scheduler, op: ReadyOp) -> tuple[float, int, float]:
        """The smaller, the sooner; equals keep the region's order.

        What can start first. Of that: what is a short step before a long collective; what surely
        need not wait; what reads the collective that has been under way longest.
        """
        compute_ms, collective_ms = s.lead(op)
        rank = 1 + s.waits_for(op, self.stream(op))
        if 4 * compute_ms < collective_ms:
            rank = -1
        return s.start_ms(op, self.stream(op)), rank, compute_ms

    def split(self, s: Scheduler) -> None:
        """Leave the batch whole."""

    def ready(self, s: Scheduler) -> Sequence[ReadyOp]:
        """What may be picked."""
        return s.get_ready_ops()

    def together(self, op: ReadyOp, ready: Sequence[ReadyOp]) -> Sequence[ReadyOp]:
        """What is launched when `op` is picked."""
        return (op,)

    def stream(self, op: ReadyOp) -> str | None:
        """The lane of `op`; None is the default: "comm" for collectives, else "compute"."""
        return None
