"""What the engine's tests share: one capture run under many plans, and the tolerance."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train.strategy import Strategy
from tests.engine.stepping import Inputs, Result, cast, step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.zoo import Case


class Switch(Strategy):
    """Runs whatever strategy is `now`, anew at every step: many plans from one capture."""

    dynamic = True

    def __init__(self, *rules: Any) -> None:
        object.__setattr__(self, "now", Cut())
        object.__setattr__(self, "rules", rules)

    def use(self, strategy: Strategy) -> None:
        """From the next forward on."""
        object.__setattr__(self, "now", strategy)

    def schedule(self, s):
        self.now.schedule(s)


class Cut(Strategy):
    """Into the given parts or sizes, everything else as it comes; collectives on their own lane."""

    def __init__(self, parts: Any = 1) -> None:
        object.__setattr__(self, "parts", parts)

    def schedule(self, s):
        s.split(None if s.context.forward_sizes else self.parts)
        while ready := s.get_ready_ops():
            s.execute(ready[0])


class AnySchedule(Strategy):
    """A random legal schedule: sizes, order, merged runs, streams. The same for the same seed."""

    def __init__(self, seed: int, lanes: tuple[str, ...] = ("compute", "comm", "copy")) -> None:
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "lanes", lanes)
        object.__setattr__(self, "drawn", [])  # what was issued, over both phases

    def schedule(self, s):
        pick = random.Random(f"{self.seed} {s.context.phase}")
        merging, streams = pick.choice([0, 0.4, 0.9]), pick.randint(1, len(self.lanes))
        s.split(None if s.context.forward_sizes else sizes_for(s.context.batch, pick))
        while ready := s.get_ready_ops():
            op = pick.choice(ready)
            together = [op]
            for each in ready[ready.index(op) + 1 :]:
                if (
                    each.op == op.op
                    and each.micro_batch.index == together[-1].micro_batch.index + 1
                ):
                    if pick.random() > merging or not op.is_mergeable:
                        break
                    together.append(each)
            s.execute(together, stream=pick.choice(self.lanes[:streams]))
        self.drawn.append((s.sizes, *s.launches))


def sizes_for(batch: int, pick: random.Random, most: int = 4) -> tuple[int, ...]:
    """Random sizes of up to `most` micro-batches."""
    cuts = sorted(pick.sample(range(1, batch), pick.randint(0, min(most, batch) - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True))


def compiled(
    case: Case, strategy: Strategy | str, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    """A fresh model of the case (always the same parameters), compiled in place."""
    model = plain(case, dtype)
    return df.compile(
        model, strategy, **{"executor": "eager", "batch_dim": case.batch_dim, **options}
    )


def plain(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh model of the case, always with the same parameters."""
    torch.manual_seed(7)
    return case.make().to(dtype).train()


def batch(case: Case, size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Inputs:
    """Inputs of a given batch size, the same for every dtype."""
    torch.manual_seed(seed)
    return cast(case.inputs(size), dtype)


class Oracle:
    """What a step must give, and how far the plain run of the same dtype is from it."""

    def __init__(self, case: Case, size: int, dtype: torch.dtype, seed: int = 1) -> None:
        exact = torch.float64 if dtype == torch.float32 else torch.float32
        # The same parameters and inputs: rounded to `dtype` first, then held exactly.
        inputs = batch(case, size, dtype, seed)
        self.truth = step(plain(case, dtype).to(exact), cast(inputs, exact))
        self.plain = step(plain(case, dtype), inputs)
        # Each addend of a micro-batch is rounded, and their sums; what cancels in them shows more.
        factor, rounding = (2, 1e-5) if dtype == torch.float32 else (4, torch.finfo(dtype).eps / 2)
        self.allowed = {k: factor * e + rounding for k, e in self.plain.errors(self.truth).items()}

    def check(self, found: Result, where: object = "") -> None:
        """Assert that `found` is as near to the truth as the plain run.

        Raises:
            AssertionError: lists every tensor that is not.
        """
        errors = found.errors(self.truth)
        bad = [
            f"{k}: {e:.1e} > {self.allowed[k]:.1e}"
            for k, e in errors.items()
            if not e <= self.allowed[k]
        ]
        assert not bad, f"{where}: " + "; ".join(bad)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Sequential runs are announced by a warning; where they are wanted it says nothing new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", df.DynaFlowWarning)
        yield


def merged_ops(model: nn.Module, phase: str | None = None) -> dict[str, str]:
    """Ops that run merged because they mix samples, with the reason."""
    return {
        op.name: op.reason
        for used in df.plans(model)
        if phase in (None, used.region.phase)
        for op in used.region.ops
        if op.merged and op.reason
    }


def launches(model: nn.Module) -> Callable[[str], list[tuple[int, ...]]]:
    """The micro-batches of every launch of an op in the newest plans."""
    return lambda name: [
        launch.micro_batches
        for used in df.plans(model)
        for launch in used.plan.launches
        if name in launch.ops
    ]
