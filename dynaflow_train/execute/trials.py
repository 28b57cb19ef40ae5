"""Candidates in turn in the first calls of a context, then the one that was fastest.

A forward's record says which candidate it ran, so that its backward runs the same and its time is
added to the right one. Calls are counted alike on all ranks; times are exchanged once, at the end.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from dynaflow_train.execute.runner import Runner
    from dynaflow_train.ir import Phase

PATIENCE = 4  # as many times the calls needed, and a choice is made without backwards


class _Stopwatch:
    """Events on the current stream on CUDA, the clock on the CPU."""

    def __init__(self) -> None:
        self._begin: Any = self._now()
        self._end: Any = None

    @staticmethod
    def _now() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._end = self._now()

    @property
    def ms(self) -> float:
        if isinstance(self._begin, float):
            return ((self._end or self._begin) - self._begin) * 1e3
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


@dataclass
class Trial:
    """One context: what was measured so far and, at last, the choice.

    Attributes:
        runs: calls of each candidate, by phase.
        watches: of the calls that count.
        chosen: index of the candidate that runs from now on.
        times: milliseconds of each candidate, the slowest rank's; empty if it was recalled.
    """

    runs: list[dict[Phase, int]]
    watches: list[dict[Phase, list[_Stopwatch]]]
    calls: int = 0
    chosen: int | None = None
    times: list[float] = field(default_factory=list[float])

    def ms(self, candidate: int) -> float:
        """Median forward plus median backward on this rank."""
        watches = self.watches[candidate].values()
        return sum(statistics.median(watch.ms for watch in each) for each in watches if each)


@dataclass
class Trials:
    """All contexts of one captured graph.

    Attributes:
        names: the candidates.
        warmups, samples: calls of each candidate that do not count, and that do.
        recall: context -> a choice made before and agreed over ranks, or None.
        settle: context and this rank's milliseconds -> the choice, and the slowest rank's.
        one_by_one: finish a candidate before the next, so that its memory can go: recorded calls
            hold a step's activations. Else in turn, which is fairer.
    """

    names: tuple[str, ...]
    warmups: int
    samples: int
    recall: Callable[[Hashable], int | None]
    settle: Callable[[Hashable, Sequence[float]], tuple[int, list[float]]]
    one_by_one: bool = False
    contexts: dict[Hashable, Trial] = field(default_factory=dict["Hashable", Trial])

    def next(self, context: Hashable) -> tuple[int, bool]:
        """The candidate of the next forward, and whether the choice is still open."""
        trial = self.contexts.get(context)
        if trial is None:
            count = range(len(self.names))
            trial = self.contexts[context] = Trial([{} for _ in count], [{} for _ in count])
            trial.chosen = self.recall(context)
        if trial.chosen is None and self._is_over(trial):
            trial.chosen, trial.times = self.settle(
                context, [trial.ms(i) for i in range(len(self.names))]
            )
            trial.watches = []
        if trial.chosen is not None:
            return trial.chosen, False
        trial.calls += 1
        if self.one_by_one:
            return self._unfinished(trial), True
        return (trial.calls - 1) % len(self.names), True

    def _unfinished(self, trial: Trial) -> int:
        """The first candidate that did not run often enough; patience ends for each of them."""
        needed = self.warmups + self.samples
        for index, runs in enumerate(trial.runs):
            forwards, backwards = runs.get("forward", 0), runs.get("backward", 0)
            if min(forwards, backwards) < needed and forwards < PATIENCE * needed:
                return index
        return len(trial.runs) - 1

    def in_use(self) -> list[int]:
        """The candidates that still may run: the chosen ones, all where a choice is open."""
        chosen = {trial.chosen for trial in self.contexts.values()} or {None}
        kept = [each for each in chosen if each is not None]
        return list(range(len(self.names))) if None in chosen else sorted(kept)

    def _is_over(self, trial: Trial) -> bool:
        needed = self.warmups + self.samples
        done = [min(r.get("forward", 0), r.get("backward", 0)) for r in trial.runs]
        return min(done) >= needed or trial.calls >= PATIENCE * needed * len(self.names)

    def timed(self, context: Hashable, candidate: int, phase: Phase) -> _Stopwatch | None:
        """A running watch if this call counts."""
        trial = self.contexts[context]
        if trial.chosen is not None:
            return None
        trial.runs[candidate][phase] = run = trial.runs[candidate].get(phase, 0) + 1
        if not self.warmups < run <= self.warmups + self.samples:
            return None
        watch = _Stopwatch()
        trial.watches[candidate].setdefault(phase, []).append(watch)
        return watch


class TriedRunner:
    """Stands for the runners of all candidates, in forward or backward."""

    def __init__(self, runners: Sequence[Runner], trials: Trials) -> None:
        self.runners, self.trials = runners, trials
        self._boxed_call = True
        self.phase: Phase = runners[0].facts.region.phase
        self._tried: set[tuple[Any, ...]] = set()

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run one call; `arguments` is emptied."""
        context, candidate, is_open = self._which(arguments)
        runner = self.runners[candidate]
        if not is_open:
            if context in self._tried:
                self._tried.remove(context)
                for other in self.runners:
                    if other is not runner:
                        other.drop(context)
            return runner(arguments)
        self._tried.add(context)
        if self.trials.one_by_one and self.phase == "forward":
            for other in self.runners:
                if other is not runner:
                    other.release()
        entry = runner.entry(arguments)  # compiles now, not within the time that counts
        watch = self.trials.timed(context, candidate, self.phase)
        runs = self.trials.contexts[context].runs[candidate].get(self.phase, 0)
        results = runner.run(entry, runs, arguments)
        if watch is not None:
            watch.stop()
        return results

    def _which(self, arguments: list[Any]) -> tuple[tuple[Any, ...], int, bool]:
        """The context, the candidate to run, and whether the choice is still open."""
        if self.phase == "forward":
            context = self.runners[0].context(arguments)
            return context, *self.trials.next(context)
        record = self.runners[0].record_of(arguments)
        assert record is not None, "a capture with candidates has tickets"
        is_open = self.trials.contexts[record.context].chosen is None
        return record.context, record.candidate, is_open
