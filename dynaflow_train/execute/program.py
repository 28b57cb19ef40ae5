"""A plan with its memory: the steps that the interpreter and the fast path both run.

Tensors live in numbered slots of a flat environment. A `Block` is one launch of the plan with the
views it needs before, the sums it makes after, and the slots that may be dropped when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dynaflow_train.execute.collectives import Collective, RowsCollective
    from dynaflow_train.execute.compile import Function
    from dynaflow_train.execute.meta import Meta
    from dynaflow_train.ir import Plan, Region

MAIN = "compute"  # the lane that is the caller's own stream


@dataclass(frozen=True)
class Alloc:
    """`out` = an uninitialised tensor."""

    out: int
    meta: Meta


@dataclass(frozen=True)
class Lend:
    """`out` = a tensor that every call uses again."""

    out: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Part:
    """`out` = samples `start` to `start + length` of `source`.

    With `outer > 1` the rows of a micro-batch stand apart: the part is a copy unless `view` asks
    for the strided view that keeps `outer`, batch and inner rows as three dimensions.
    """

    out: int
    source: int
    dim: int
    outer: int
    inner: int
    batch: int
    start: int
    length: int
    view: bool = False

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor."""
        start, length = self.start * self.inner, self.length * self.inner
        if self.outer == 1:
            return tensor.narrow(self.dim, start, length)
        shape = (self.outer, self.batch * self.inner)
        part = tensor.unflatten(self.dim, shape).narrow(self.dim + 1, start, length)
        return part if self.view else part.flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Restride:
    """`out` = `source` with the strides it is expected to have: a copy where they differ."""

    out: int
    source: int
    meta: Meta


@dataclass(frozen=True)
class Run:
    """Call a compiled op; `inputs` ends with the slices it writes into."""

    function: Function
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Communicate:
    """Launch a collective from `source` into `out` (the same slot's tensor when in place).

    A `blocking` one is over when the next step of its block runs.
    """

    function: Collective
    source: int
    out: int
    blocking: bool = False


@dataclass(frozen=True)
class SendRows:
    """Launch a collective that makes `out` itself: its size is known by then."""

    function: RowsCollective
    inputs: tuple[int, ...]
    out: int


@dataclass(frozen=True)
class Store:
    """Copy `source` into the slice in slot `into`."""

    into: int
    source: int


@dataclass(frozen=True)
class Alias:
    """`out` = `source`, the same tensor."""

    out: int
    source: int


@dataclass(frozen=True)
class Sum:
    """`out` = `left + right`; in place on `left` when `in_place`."""

    out: int
    left: int
    right: int
    in_place: bool


Step = Alloc | Lend | Part | Restride | Run | Communicate | SendRows | Store | Alias | Sum


def reads(step: Step) -> tuple[int, ...]:
    """The slots whose tensors a step reads or writes into."""
    match step:
        case Alloc() | Lend():
            return ()
        case Run(inputs=inputs) | SendRows(inputs=inputs):
            return inputs
        case Communicate(source=source, out=out):
            return source, out
        case Store(into, source):
            return into, source
        case Sum(left=left, right=right):
            return left, right
        case Part(source=source) | Restride(source=source) | Alias(source=source):
            return (source,)


@dataclass
class Block:
    """One launch.

    Attributes:
        launch: position in the plan.
        lane: the stream it runs on.
        waits: launches on other lanes that its lane waits for first.
        own_waits: collectives on its own lane that it reads: streams order them, CPU lanes do not.
        steps: what it does, in order.
        drops: slots that are dropped before it starts.
        drops_after: slots that are dropped as soon as it is issued.
        is_collective: whether it completes later than it is issued.
        awaited: whether anything on another lane waits for it.
    """

    launch: int
    lane: str
    waits: tuple[int, ...] = ()
    own_waits: tuple[int, ...] = ()
    steps: list[Step] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    drops_after: list[int] = field(default_factory=list)
    is_collective: bool = False
    awaited: bool = False


@dataclass(frozen=True)
class Program:
    """What runs one context.

    Attributes:
        arguments: index in the call's argument list -> slot.
        prologue: steps on the main lane before the first launch.
        blocks: the launches.
        epilogue: steps on the main lane after all lanes have joined.
        results: for every result a slot, or a constant.
        foreign: slots among the results whose memory belongs to another lane than the main one.
        spans: for the forward: saved value -> which runs of micro-batches its slots hold.
        copies: value name -> bytes that the engine itself copies in each call.
    """

    plan: Plan
    region: Region
    device: torch.device
    num_slots: int
    arguments: Mapping[int, int]
    prologue: tuple[Step, ...]
    blocks: tuple[Block, ...]
    epilogue: tuple[Step, ...]
    results: tuple[int | Constant, ...]
    foreign: frozenset[int]
    spans: Mapping[str, tuple[tuple[int, int], ...]]
    copies: Mapping[str, int]


@dataclass(frozen=True)
class Constant:
    """A result that is the same in every call: a number, an empty slot, None."""

    value: Any
