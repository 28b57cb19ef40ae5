"""Strategy and Scheduler: what a user subclasses, and what its `schedule` calls.

A strategy runs against symbolic ops, once per context. What it issues becomes a plan; tensors never
appear here. Forward and backward go through the same `schedule`; `context.phase` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dynaflow_train.clocks import ALL, Readiness, estimate_ms, leads
from dynaflow_train.config import nearest
from dynaflow_train.errors import KernelError, ScheduleError, SplitError
from dynaflow_train.ir import Launch, OpKind, Phase, Region

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dynaflow_train.annotate import Rule

COMPUTE = "compute"
COMM = "comm"


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
    is_mergeable: bool = True  # for several micro-batches at once; rows of experts are not

    def __str__(self) -> str:
        return self.op if self.micro_batch is None else f"{self.op}[{self.micro_batch.index}]"


@dataclass(frozen=True)
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

    @property
    def most_micro_batches(self) -> int | None:
        """The greatest number it ever cuts into: saved values get that much room. None: unknown."""
        return None

    @property
    def alternatives(self) -> Mapping[str, Strategy]:
        """Strategies by name, of which the engine keeps the fastest in each context."""
        return {self.name: self}

    def schedule(self, s: Scheduler) -> None:
        """Issue every op of every micro-batch through `s.execute`, or call `s.sequential`."""
        raise NotImplementedError(f"{type(self).__name__} must define schedule(self, s).")


class Scheduler:
    """Keeps what is ready and takes down what a strategy issues.

    Attributes:
        context: what a strategy may look at.
        launches: what was issued so far, still without waits.
        reason: why it became sequential, if it did.
        refused: why the region cannot be cut, if that was asked for.
    """

    def __init__(self, region: Region, context: Context, kernels: Collection[str] = ()) -> None:
        self.context = context
        self.reason: str | None = None
        self.refused: str | None = None
        self.launches: list[Launch] = []
        self._region = region
        self._kernels = kernels
        self._index = {op.name: index for index, op in enumerate(region.ops)}
        self._positions: dict[tuple[int, int], int] = {}
        self._was_split = False
        self._awaited = -1  # the last collective that some launch reads
        self._free: dict[str, float] = {}  # when each stream is free again, by the estimates
        self._ends: dict[tuple[int, int], float] = {}
        self._leads = leads(region, context.times)
        self._cut(context.forward_sizes or (context.batch,))

    def _cut(self, sizes: tuple[int, ...]) -> None:
        self.micro_batches = tuple(MicroBatch(index, size) for index, size in enumerate(sizes))
        self._state = Readiness(self._region, len(sizes))
        self._views: dict[tuple[int, int], ReadyOp] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each micro-batch: the forward's, or one of the whole batch before `split`."""
        return tuple(part.size for part in self.micro_batches)

    @property
    def remaining(self) -> int:
        """How many runs (op and micro-batch) have not been issued."""
        return len(self._state.missing)

    def split(self, parts: int | Sequence[int] | None = None) -> tuple[MicroBatch, ...]:
        """Cut the batch: into `parts` as even as possible, larger first, or into the given sizes.

        Without an argument, in the backward: the forward's. A region that cannot be cut gives one
        micro-batch, and the plan's `reason` says why.

        Raises:
            SplitError: the sizes do not fit the batch, the capture or the forward.
            ScheduleError: something was issued already, or `split` was called before.
        """
        if self.launches or self._was_split:
            raise ScheduleError(
                f"split was called {'twice' if self._was_split else 'after the first execute'}. "
                f"The micro-batches are fixed by then; call it once, first."
            )
        region, forward = self._region, self.context.forward_sizes
        sizes = self._asked(parts)
        if len(sizes) > 1 and not region.can_split and len(forward or (0,)) == 1:
            self.reason = region.why_not or f"region {region.name} cannot be cut"
            self.refused = self.reason
            sizes = self.sizes
        if forward is not None and sizes != forward:
            raise SplitError(
                f"the forward of {region.name} ran with micro-batches of {list(forward)} samples, "
                f"its backward asks for {list(sizes)}. Call s.split() without sizes there."
            )
        self._was_split = True
        self._cut(sizes)
        return self.micro_batches

    def _asked(self, parts: int | Sequence[int] | None) -> tuple[int, ...]:
        """The sizes asked for, checked against batch and capture."""
        batch, most = self.context.batch, self.context.max_micro_batches
        parts = self.context.forward_sizes if parts is None else parts
        if parts is None:
            raise SplitError(
                "split() without sizes returns the forward's, in the backward. In the forward "
                "give the number of micro-batches or their sizes."
            )
        number = parts if isinstance(parts, int) else len(parts)
        if not 1 <= number <= batch:
            raise SplitError(
                f"cannot split a batch of {batch} sample(s) into {number} micro-batches. Set "
                f"micro_batches to at most {batch}, or give each rank at least {max(number, 1)} "
                f"samples."
            )
        if number > most:
            raise SplitError(
                f"cannot split into {number} micro-batches: the capture has room for {most}. Set "
                f"micro_batches to at most {most}, or max_micro_batches to at least {number}."
            )
        if isinstance(parts, int):
            size, larger = divmod(batch, parts)
            return (size + 1,) * larger + (size,) * (parts - larger)
        if min(parts) < 1 or sum(parts) != batch:
            raise SplitError(
                f"micro-batches of {list(parts)} samples make {sum(parts)}, the batch has {batch}. "
                f"Give sizes of at least 1 that add up to {batch}."
            )
        return tuple(parts)

    def get_ready_ops(self, micro_batch: MicroBatch | None = None) -> tuple[ReadyOp, ...]:
        """The ops whose inputs have been issued and which have not been, in region order.

        Args:
            micro_batch: only its ops; ops that run once for all micro-batches are left out then.
        """
        wanted = None if micro_batch is None else micro_batch.index
        return tuple(
            self._view(run) for run in self._state.ready if wanted is None or run[1] == wanted
        )

    def readers(self, op: ReadyOp) -> tuple[ReadyOp, ...]:
        """The ops that read what `op` makes, of the same micro-batch, ready or not."""
        return tuple(map(self._view, self._state.reading(self._run(op))))

    def follow(self, chain: Sequence[ReadyOp]) -> tuple[ReadyOp, ...]:
        """The ops that only wait for `chain`: a ready op, and what follows it."""
        return tuple(map(self._view, self._state.after([self._run(op) for op in chain])))

    def start_ms(self, op: ReadyOp, stream: str | None = None) -> float:
        """When the ready `op` could start on `stream`, by the estimates, after what was issued."""
        ends = (self._ends.get(source, 0.0) for source in self._state.inputs(self._run(op)))
        return max([self._free.get(stream or _lane(op), 0.0), *ends])

    def waits_for(self, op: ReadyOp, stream: str | None = None) -> int:
        """Position of the newest collective under way that the ready `op` reads, or -1.

        Under way: by measured times if the context has any; else until some other launch read it.
        """
        lane = stream or _lane(op)
        if self.context.times and self.start_ms(op, lane) <= self._free.get(lane, 0.0):
            return -1
        newest = self._newest_collective(self._run(op))
        return newest if self.context.times or newest > self._awaited else -1

    def _newest_collective(self, run: tuple[int, int]) -> int:
        """The last position of a collective that `run` reads, or -1."""
        ops, inputs = self._region.ops, self._state.inputs(run)
        return max((self._positions[i] for i in inputs if ops[i[0]].is_communication), default=-1)

    def lead(self, op: ReadyOp) -> tuple[float, float]:
        """Estimated ms from `op` to the next collective that needs it (or infinite), and of it."""
        index, part = self._run(op)
        compute_ms, collective_ms = self._leads[index]
        return compute_ms * self._share(part), collective_ms * self._share(part)

    def _share(self, part: int) -> float:
        """The part of the batch that a micro-batch is."""
        return 1.0 if part == ALL else self.sizes[part] / max(sum(self.sizes), 1)

    def execute(
        self,
        op: ReadyOp | Sequence[ReadyOp],
        micro_batches: Sequence[MicroBatch] | None = None,
        stream: str | None = None,
        kernel: str | None = None,
    ) -> None:
        """Issue one launch.

        Args:
            op: a ready op; the same op of adjacent micro-batches, which then runs once, merged; or
                a chain of ops of one micro-batch that `kernel` replaces.
            micro_batches: with one op: run it merged for these, which must be adjacent.
            stream: a lane's name; by default "comm" for a collective, else "compute".
            kernel: name of a registered kernel to run in place of the op or ops.

        Raises:
            ScheduleError: an op is not ready or was issued, or the ops or micro-batches do not go
                together.
            KernelError: no such kernel.
        """
        ops = (op,) if isinstance(op, ReadyOp) else tuple(op)
        names, parts = self._together(ops, micro_batches, kernel)
        if kernel is not None and kernel not in self._kernels:
            raise KernelError(
                f"no kernel {kernel!r} for {' + '.join(names)}. {nearest(kernel, self._kernels)}"
            )
        runs = [(self._index[name], part) for name in names for part in parts]
        lane = stream or _lane(ops[0])
        for run in runs:
            self._take(run, lane)
        covered = range(len(self.sizes)) if parts == (ALL,) else parts
        self.launches.append(Launch(names, tuple(covered), lane, kernel))

    def sequential(self, reason: str | None = None) -> None:
        """Issue all that remains in region order on one stream.

        Args:
            reason: why the strategy does not do what it is made for; reports show it.
        """
        self.reason = reason or self.reason
        for index in range(len(self._region.ops)):
            for part in self._state.parts(index):
                if (index, part) in self._state.missing:
                    self.execute(self._view((index, part)), stream=COMPUTE)

    def _together(
        self,
        ops: tuple[ReadyOp, ...],
        micro_batches: Sequence[MicroBatch] | None,
        kernel: str | None,
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The op names and the micro-batches of one launch."""
        names = list(dict.fromkeys(op.op for op in ops))
        for op in ops:
            self._run(op)
        if micro_batches is not None and len(names) == 1:
            if not set(micro_batches) <= set(self.micro_batches):
                raise ScheduleError(
                    f"{names[0]} for {list(micro_batches)}: not the micro-batches of this split, "
                    f"which has sizes {list(self.sizes)}."
                )
            asked = sorted(part.index for part in micro_batches)
        else:
            asked = sorted({ALL if op.micro_batch is None else op.micro_batch.index for op in ops})
        if not asked:
            raise ScheduleError("execute was given no op or no micro-batch.")
        if len(names) > 1 and (kernel is None or len(asked) > 1 or micro_batches is not None):
            raise ScheduleError(
                f"{' + '.join(map(str, ops))} are different ops. Several ops in one launch need "
                f"kernel= and must belong to one micro-batch."
            )
        merged = self._state.merged[self._index[names[0]]]
        if merged and micro_batches is not None:
            if asked != list(range(len(self.sizes))):
                raise ScheduleError(
                    f"{names[0]} runs once for all {len(self.sizes)} micro-batches, not {asked}."
                )
            asked = [ALL]
        if asked != list(range(asked[0], asked[0] + len(asked))):
            raise ScheduleError(
                f"{names[0]} was asked to run merged for micro-batches {asked}, which are not "
                f"adjacent. Merge neighbours, or run it for each."
            )
        if len(asked) > 1 and not all(op.is_mergeable for op in ops):
            raise ScheduleError(f"{names[0]} has rows by expert: run it for each of {asked} alone.")
        return tuple(names), tuple(asked)

    def _take(self, run: tuple[int, int], lane: str) -> None:
        """Issue one run as part of the next launch."""
        state, shown = self._state, self._view(run)
        if run not in state.missing:
            raise ScheduleError(
                f"{shown} was issued before, at position {self._positions[run]}. "
                f"Take ops from s.get_ready_ops()."
            )
        if state.missing[run]:
            lacking = [str(self._view(each)) for each in state.inputs(run) if each in state.missing]
            raise ScheduleError(
                f"{shown} is not ready: it reads {', '.join(lacking)}, not issued yet. Take ops "
                f"from s.get_ready_ops()."
            )
        self._free[lane] = self._ends[run] = self.start_ms(shown, lane) + shown.estimated_ms
        self._awaited = max(self._awaited, self._newest_collective(run))
        state.issue(run)
        self._positions[run] = len(self.launches)

    def _run(self, op: ReadyOp) -> tuple[int, int]:
        """The op and micro-batch that `op` stands for, checked to be of this region and split."""
        index = self._index.get(op.op)
        part = ALL if op.micro_batch is None else op.micro_batch.index
        known = index is not None and part in self._state.parts(index)
        if index is None or not known or op.micro_batch not in (None, *self.micro_batches):
            raise ScheduleError(
                f"{op} is no op of {self._region.name} {self._region.phase} with micro-batches of "
                f"{list(self.sizes)} samples. Take ops from s.get_ready_ops(), after s.split()."
            )
        return index, part

    def _view(self, run: tuple[int, int]) -> ReadyOp:
        """What a strategy sees of one run; made once."""
        if run in self._views:
            return self._views[run]
        op = self._region.ops[run[0]]
        micro_batch = None if run[1] == ALL else self.micro_batches[run[1]]
        estimated_ms = estimate_ms(op, self.context.times) * self._share(run[1])
        what = op.name, micro_batch, op.kind, op.layer, self._region.phase
        kind = op.is_communication, op.is_wgrad, estimated_ms, op.collective
        view = ReadyOp(*what, *kind, op.name not in self._region.apart)
        return self._views.setdefault(run, view)


def _lane(op: ReadyOp) -> str:  # the stream of an op for which the strategy names none
    return COMM if op.is_communication else COMPUTE
