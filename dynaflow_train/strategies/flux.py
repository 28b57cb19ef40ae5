"""Products fused with the collective before or behind them; the batch stays whole.

After Flux (arXiv 2406.06858), for tensor parallelism with sequence parallelism or without: parts of
a product travel while the next is computed. How a kernel runs is measured for each shape, and where
it cannot run, or the plain chain is faster, that runs in its place (`explain` says so).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.annotate import Rule, SplitModule
from dynaflow_train.strategies.comm_overlap import CommOverlap
from dynaflow_train.strategy import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.strategy import ReadyOp, Scheduler

_LINEARS = ("o_proj", "down_proj", "linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Flux(CommOverlap):
    """CommOverlap with a kernel in place of a product and its collective.

    Args:
        dgrads: also fuse the product of dgrad with the collective behind it, which otherwise runs
            beside wgrads.
    """

    dgrads: bool = False

    name: ClassVar[str] = "flux"
    rules: ClassVar[tuple[Rule, ...]] = (
        *CommOverlap.rules,
        SplitModule("|".join(f"*.{each}" for each in _LINEARS), optional=True),
    )

    def issue(self, s: Scheduler, op: ReadyOp, ready: Sequence[ReadyOp]) -> None:
        """Launch what was picked, a pair by its kernel."""
        after = [each for each in s.follow((op,)) if not each.is_wgrad]
        if len(after) == 1 and op.collective == "all_gather" and after[0].kind == "compute":
            return s.execute((op, after[0]), stream=COMPUTE, kernel="all_gather_matmul")
        behind = len(after) == 1 and op.kind == "compute" and not op.is_wgrad
        if behind and (self.dgrads or s.context.phase != "backward"):
            kernel = f"matmul_{after[0].collective}"
            if after[0].collective in ("all_reduce", "reduce_scatter"):
                return s.execute((op, after[0]), stream=COMPUTE, kernel=kernel)
        return super().issue(s, op, ready)
