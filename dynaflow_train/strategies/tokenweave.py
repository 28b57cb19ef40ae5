"""Micro-batches in turn, the all-reduce of one fused with the addition and norm that follow it.

After TokenWeave (microsoft/tokenweave). The fused kernel takes few SMs or none, so that it runs
beside the other micro-batch's products; how it runs is measured for each shape, and where it cannot
run, or the plain chain is faster, that runs in its place (`explain` says so). In the backward the
all-reduce of dgrad runs beside wgrad, as in `comm_overlap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.annotate import Rule, SplitModule
from dynaflow_train.strategies.comm_overlap import CommOverlap
from dynaflow_train.strategies.dual_batch import DualBatch
from dynaflow_train.strategy import COMM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.strategy import ReadyOp, Scheduler

KERNEL = "all_reduce_rms_norm"
LONGEST = 3  # all-reduce, addition, norm


@dataclass(frozen=True)
class TokenWeave(DualBatch):
    """DualBatch with `all_reduce_rms_norm` in place of all-reduce, addition and norm."""

    name: ClassVar[str] = "tokenweave"
    rules: ClassVar[tuple[Rule, ...]] = (
        *CommOverlap.rules,
        SplitModule("*norm|*.ln_1|*.ln_2", optional=True),
    )

    def issue(self, s: Scheduler, op: ReadyOp, ready: Sequence[ReadyOp]) -> None:
        """Launch what was picked, a chain by the kernel."""
        chain = _chain(s, op)
        if len(chain) == LONGEST:  # without a norm behind it there is little to fuse
            s.execute(chain, stream=COMM, kernel=KERNEL)
        else:
            super().issue(s, op, ready)


def _chain(s: Scheduler, op: ReadyOp) -> tuple[ReadyOp, ...]:
    """A forward all-reduce and the pointwise ops that read it, one after another."""
    chain = (op,)
    while op.collective == "all_reduce" and s.context.phase != "backward":
        readers = s.readers(chain[-1])
        after = [each for each in s.follow(chain) if each in readers and each.kind == "memory"]
        if len(after) != 1 or len(chain) == LONGEST:
            break
        chain += (after[0],)
    return chain
