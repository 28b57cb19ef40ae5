"""Runs candidates in turn during the first steps, and then the fastest of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies.comm_overlap import CommOverlap
from dynaflow_train.strategies.dual_batch import DualBatch
from dynaflow_train.strategies.flux import Flux
from dynaflow_train.strategies.named import parse
from dynaflow_train.strategies.nanoflow import NanoFlow
from dynaflow_train.strategies.sequential import Sequential
from dynaflow_train.strategies.tokenweave import TokenWeave
from dynaflow_train.strategy import Scheduler, Strategy

CANDIDATES: tuple[type[Strategy], ...] = (
    Sequential, CommOverlap, DualBatch, NanoFlow, TokenWeave, Flux,
)  # fmt: skip


@dataclass(frozen=True)
class Auto(Strategy):
    """The fastest of several candidates, chosen by measurement in each context.

    Every step of the choice is a correct training step. The slowest rank's time counts.

    Args:
        candidates: one line each, `name parameter=value ...`. One alone is pinned.
        exclude: candidates left out, by name or by their whole line.
        warmups: runs of each candidate in a context that do not count.
        samples: runs of each that do; their median counts.
        cache: keep the choice on disk for the next run (`DYNAFLOW_CACHE` says where).
    """

    candidates: tuple[str, ...] = (
        "sequential",
        "comm_overlap",
        "dual_batch",
        "dual_batch merge_wgrads=true",
        "nanoflow",
    )
    exclude: tuple[str, ...] = ()
    warmups: int = 2
    samples: int = 3
    cache: bool = True

    def __post_init__(self) -> None:
        """Refuse what is wrong before anything runs."""
        _ = self._found

    @property
    def alternatives(self) -> dict[str, Strategy]:
        """The candidates by their lines."""
        return self._found

    @cached_property
    def _found(self) -> dict[str, Strategy]:
        """`sequential` first among them: so the choice never loses.

        Raises:
            RecipeError: a candidate or exclusion that does not exist, or nothing is left.
        """
        lines = [" ".join(line.split()) for line in self.candidates]
        if len(lines) > 1 and Sequential.name not in lines:
            lines = [Sequential.name, *lines]
        found = {line: parse(CANDIDATES, line) for line in dict.fromkeys(lines)}
        for line in self.exclude:
            out = [each for each in found if line in (each, each.split()[0])]
            if not out:
                raise RecipeError(f"auto excludes {line!r}, but tries only {', '.join(found)}.")
            for each in out:
                del found[each]
        if not found or self.samples < 1 or self.warmups < 1:
            raise RecipeError(
                f"auto needs a candidate, warmups and samples of at least 1; found "
                f"{len(found)} candidate(s), warmups {self.warmups}, samples {self.samples}."
            )
        return found

    @property
    def most_micro_batches(self) -> int | None:
        """As many as the candidate that cuts most."""
        most = [each.most_micro_batches for each in self.alternatives.values()]
        return None if None in most else max(each or 1 for each in most)

    def schedule(self, s: Scheduler) -> None:
        """The first candidate's plan; the engine asks each candidate itself."""
        next(iter(self.alternatives.values())).schedule(s)
