"""Strategy and Scheduler: what a user subclasses, and what its `schedule` calls.

A strategy runs against symbolic ops, once per context. What it issues becomes a plan; tensors never
appear here. Forward and backward go through the same `schedule`; `context.phase` says which.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from dynaflow_train.annotate import Rule
from dynaflow_train.errors import KernelError, ScheduleError, SplitError
from dynaflow_train.ir import Launch, Op, OpKind, Phase, Region

COMPUTE = "compute"
COMM = "comm"
# Rates of a current data-centre GPU, per millisecond: they order ops where nothing was measured.
FLOPS_PER_MS, MEMORY_BYTES_PER_MS, LINK_BYTES_PER_MS = 4e11, 3e9, 1.5e8
_ALL = -1  # in place of a micro-batch index: the op runs once for all of them


def estimate_ms(op: Op, times: Mapping[str, float]) -> float:
    """Milliseconds of `op` for the whole batch: measured if `times` has it, else from its size."""
    if op.name in times:
        return times[op.name]
    if op.is_communication:
        return op.bytes / LINK_BYTES_PER_MS
    return max(op.flops / FLOPS_PER_MS, op.bytes / MEMORY_BYTES_PER_MS)


@dataclass(frozen=True)
class Context:
    """What a strategy may look at. Everything here must be the same on every rank.

    Attributes:
        phase: forward, backward or inference.
        batch: samples in this rank's batch. tokens: samples times tokens per sample.
        device: "cpu" or "cuda".
        world_size: ranks in all. group_sizes: ranks in each process group, by its name.
        max_micro_batches: what the capture has room for.
        times: measured milliseconds of ops for the whole batch, by name; may be empty.
        forward_sizes: in the backward the sizes the forward ran with, else None.
    """

    phase: Phase
    batch: int
    tokens: int
    device: str = "cpu"
    world_size: int = 1
    group_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    max_micro_batches: int = 4
    times: Mapping[str, float] = field(default_factory=dict[str, float])
    forward_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MicroBatch:
    """A contiguous part of the batch: the `index`-th, with `size` samples."""

    index: int
    size: int


@dataclass(frozen=True)
class ReadyOp:
    """An op for one micro-batch; `micro_batch` is None for an op that runs once for all of them."""

    op: str
    micro_batch: MicroBatch | None
    kind: OpKind
    layer: int | None
    phase: Phase
    is_communication: bool
    is_wgrad: bool
    estimated_ms: float
    collective: str | None = None

    def __str__(self) -> str:
        return self.op if self.micro_batch is None else f"{self.op}[{self.micro_batch.index}]"


class Strategy:
    """Turns ops into a plan. Subclass it as a frozen dataclass; its fields are its parameters.

    Attributes:
        rules: where to cut, beside every collective, which is always an op of its own.
        split_wgrad: whether the gradients of parameters become ops apart from those of activations.
        dynamic: record anew at every step instead of once per context.
        name: what plans and recipes call it; by default the class name in snake_case.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()
    split_wgrad: ClassVar[bool] = True
    dynamic: ClassVar[bool] = False
    name: ClassVar[str] = "strategy"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def schedule(self, s: Scheduler) -> None:
        """Issue every op of every micro-batch through `s.execute`, or call `s.sequential`."""
        raise NotImplementedError(f"{type(self).__name__} must define schedule(self, s).")


class Scheduler:
    """Keeps what is ready and takes down what a strategy issues."""

    def __init__(self, region: Region, context: Context, kernels: Collection[str] = ()) -> None:
        self.context = context
        self.reason: str | None = None
        self.launches: list[Launch] = []
        self._region = region
        self._kernels = kernels
        self._index = {op.name: index for index, op in enumerate(region.ops)}
        self._cut: tuple[MicroBatch, ...] | None = None
        self._positions: dict[tuple[int, int], int] = {}
        self._reached: dict[str, int] = {}  # per stream the last collective somebody waited for

    # ---- the batch

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The parts of the batch: the forward's in the backward; one, unless `split` was called."""
        if self._cut is not None:
            return self._cut
        return _micro_batches(self.context.forward_sizes or (self.context.batch,))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each micro-batch."""
        return tuple(part.size for part in self.micro_batches)

    def split(self, parts: int | Sequence[int] | None = None) -> tuple[MicroBatch, ...]:
        """Cut the batch: into `parts` as even as possible, larger first, or into the given sizes.

        Without an argument, in the backward: the forward's. A region that cannot be cut gives one
        micro-batch, and the plan's `reason` says why.

        Raises:
            SplitError: the sizes do not fit the batch, the capture or the forward.
            ScheduleError: something was issued already, or `split` was called before.
        """
        if self.launches or self._cut is not None:
            raise ScheduleError(
                f"split was called {'twice' if self._cut else 'after the first execute'}; the "
                f"micro-batches are fixed then. Call it once, first."
            )
        context, region = self.context, self._region
        forward = context.forward_sizes
        sizes = self._asked(parts)
        if len(sizes) > 1 and not region.can_split and len(forward or (0,)) == 1:
            self.reason = region.why_not or f"region {region.name} cannot be cut"
            sizes = forward or (context.batch,)
        if forward is not None and sizes != forward:
            raise SplitError(
                f"the forward of {region.name} ran with micro-batches of {list(forward)} samples, "
                f"its backward asks for {list(sizes)}. Call s.split() without sizes there."
            )
        self._cut = _micro_batches(sizes)
        self.__dict__.pop("_missing", None)
        self.__dict__.pop("_ready", None)
        return self._cut

    def _asked(self, parts: int | Sequence[int] | None) -> tuple[int, ...]:
        """The sizes asked for, checked against batch and capture."""
        batch, most = self.context.batch, self.context.max_micro_batches
        if parts is None:
            if self.context.forward_sizes is None:
                raise SplitError("split() without sizes is for the backward; in the forward give "
                                 "a number of micro-batches or their sizes.")
            return self.context.forward_sizes
        number = parts if isinstance(parts, int) else len(parts)
        if number < 1 or number > batch:
            raise SplitError(
                f"cannot split a batch of {batch} sample(s) into {number} micro-batches. Set "
                f"micro_batches to at most {batch}, or raise the batch size of each rank to at "
                f"least {max(number, 1)}."
            )
        if number > most:
            raise SplitError(
                f"cannot split into {number} micro-batches: the capture has room for {most}. Set "
                f"micro_batches to at most {most}, or max_micro_batches to {number}."
            )
        if isinstance(parts, int):
            size, rest = divmod(batch, parts)
            return (size + 1,) * rest + (size,) * (parts - rest)
        if min(parts) < 1 or sum(parts) != batch:
            raise SplitError(
                f"micro-batches of {list(parts)} samples make {sum(parts)}, the batch has {batch}. "
                f"Give sizes of at least 1 that add up to {batch}."
            )
        return tuple(parts)

    # ---- readiness

    @cached_property
    def _readers(self) -> tuple[tuple[int, ...], ...]:
        """For each op the ops that read its outputs."""
        readers: list[list[int]] = [[] for _ in self._region.ops]
        for name, sources in self._region.predecessors.items():
            for source in sources:
                readers[self._index[source]].append(self._index[name])
        return tuple(tuple(found) for found in readers)

    @cached_property
    def _missing(self) -> dict[tuple[int, int], int]:
        """For each op and micro-batch not issued: how many of the runs it reads from are not."""
        ops, number = self._region.ops, len(self.micro_batches)
        missing: dict[tuple[int, int], int] = {}
        for index, op in enumerate(ops):
            sources = [self._region.op[name] for name in self._region.predecessors[op.name]]
            count = sum(number if op.merged and not source.merged else 1 for source in sources)
            missing.update({(index, part): count for part in self._parts(op)})
        return missing

    @cached_property
    def _ready(self) -> list[tuple[int, int]]:
        """Ops and micro-batches whose inputs have been issued, by region order."""
        return sorted(key for key, count in self._missing.items() if count == 0)

    def _parts(self, op: Op) -> Sequence[int]:
        return (_ALL,) if op.merged else range(len(self.micro_batches))

    def _view(self, index: int, part: int) -> ReadyOp:
        op, context = self._region.ops[index], self.context
        micro_batch = None if part == _ALL else self.micro_batches[part]
        share = 1.0 if micro_batch is None else micro_batch.size / max(sum(self.sizes), 1)
        return ReadyOp(
            op.name, micro_batch, op.kind, op.layer, self._region.phase, op.is_communication,
            op.is_wgrad, estimate_ms(op, context.times) * share, op.collective,
        )

    def get_ready_ops(self, micro_batch: MicroBatch | None = None) -> tuple[ReadyOp, ...]:
        """The ops whose inputs have been issued and which have not, in region order.

        Args:
            micro_batch: only its ops; ops that run once for all are left out then.
        """
        wanted = None if micro_batch is None else micro_batch.index
        return tuple(
            self._views[key] for key in self._ready if wanted is None or key[1] == wanted
        )
