"""The ops in the order of the plain run, on one stream: the baseline, and always valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynaflow_train.strategy import Scheduler, Strategy


@dataclass(frozen=True)
class Sequential(Strategy):
    """Nothing overlaps. Without rules a region is only cut at its collectives."""

    split_wgrad: ClassVar[bool] = False

    @property
    def most_micro_batches(self) -> int:
        """It never cuts."""
        return 1

    def schedule(self, s: Scheduler) -> None:
        """Everything in region order."""
        s.sequential()
