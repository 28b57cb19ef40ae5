"""Slots, parts and buffers: where each value of a program stands, and how a piece of it is had."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dynaflow_train.errors import SplitError
from dynaflow_train.execute.layout import Layout, Span
from dynaflow_train.execute.meta import Meta, row_major
from dynaflow_train.execute.program import (
    MAIN,
    Alloc,
    Part,
    Restride,
    Run,
    Step,
    Store,
    Sum,
)
from dynaflow_train.ir import Axis, Plan, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynaflow_train.execute.compile import Function, OpCompiler
    from dynaflow_train.execute.exchange import Connect
    from dynaflow_train.execute.specialise import Symbols

Key = tuple[str, Span]


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a call: which value, which micro-batches, what it looks like.

    `checked` arguments may come with other strides (a saved-tensor hook made them anew): they are
    brought to those of `meta`, which costs a copy only then. A `total` is what a value is added to.
    """

    index: int
    value: str
    span: Span
    meta: Meta
    checked: bool = False
    total: bool = False


@dataclass(frozen=True)
class Result:
    """One wanted result: a value, the `piece`-th span in which it is made, or a constant.

    A piece that the plan does not make is the constant.
    """

    value: str | None = None
    piece: int | None = None
    constant: Any = None


@dataclass(frozen=True)
class Setting:
    """What the builder is given besides plan and region.

    Attributes:
        symbols: the sizes of this context; batch: the symbol of the batch, or None.
        is_size: see `Sizes`.
        compiler: compiles ops.
        kernel: see `Session.kernel`; for launches with a kernel.
        device: where it runs.
        connect: gives memory that other ranks can read, for collectives by copies (`exchange`).
        groups: stream, name of a group -> the group that collectives there run on instead.
    """

    symbols: Symbols
    batch: Any
    is_size: Callable[[fx.Node], bool]
    compiler: OpCompiler
    kernel: Callable[..., tuple[Function, list[tuple[Meta, bool]]]]
    device: torch.device
    groups: Mapping[tuple[str, str], torch.distributed.ProcessGroup]
    connect: Connect | None = None


@dataclass
class SlotInfo:
    """What the builder knows of a slot: meta, the lane its memory belongs to, its readers."""

    meta: Meta
    home: str
    readers: list[int] = field(default_factory=list)
    kept: bool = False
    fresh: bool = True


class Memory:
    """The slots of one program while it is built."""

    def __init__(self, region: Region, plan: Plan, setting: Setting) -> None:
        self.region, self.plan, self.setting = region, plan, setting
        self.offsets = [sum(plan.sizes[:k]) for k in range(len(plan.sizes) + 1)]
        self.everything: Span = (0, len(plan.sizes))
        self.slots: list[SlotInfo] = []
        self.at: dict[Key, int] = {}
        self.made_on: dict[tuple[str, Span, str], int] = {}  # copies that only one lane may read
        self.pieces: dict[str, list[Span]] = {}
        self.buffers: dict[str, int] = {}
        self.sums: dict[str, tuple[int, int]] = {}  # value -> slot, launch of the last addition
        self.copies: dict[str, int] = {}
        self.sliced: dict[int, str] = {}  # slices of buffers, by whose buffer it is
        self.prologue: list[Step] = []
        self.layout = Layout()

    # slots and parts

    def _new(self, meta: Meta, home: str, *, fresh: bool = True) -> int:
        self.slots.append(SlotInfo(meta, home, fresh=fresh))
        return len(self.slots) - 1

    def _count(self, span: Span) -> int:
        return self.offsets[span[1]] - self.offsets[span[0]]

    def _axis(self, value: str) -> tuple[int, int, int]:
        axis = self.region.values[value].axis
        if not isinstance(axis, Axis):
            raise SplitError(
                f"{value} is only known for the whole batch, but a micro-batch of it is asked for."
            )
        return axis.at(self.setting.symbols)

    def _copied(self, value: str, slot: int) -> None:
        self.copies[value] = self.copies.get(value, 0) + self.slots[slot].meta.nbytes

    def _lane(self, launch: int) -> str:
        """The lane of a launch; the epilogue runs on the main one."""
        return self.plan.launches[launch].stream if launch < len(self.plan.launches) else MAIN

    def _part(
        self, value: str, source: int, held: Span, span: Span, *, copied_on: str | None = None
    ) -> Part:
        """A part of `source`: a view, or where its rows stand apart a copy made on a lane."""
        view = copied_on is None
        dim, outer, inner = self._axis(value)
        start = self.offsets[span[0]] - self.offsets[held[0]]
        count = self._count(held)
        part = Part(-1, source, dim, outer, inner, count, start, self._count(span), view)
        meta = self.slots[source].meta
        # A meta tensor tells shape and strides of the view without memory.
        like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        found = part.apply(like)
        copies = outer != 1 and not view
        slot = self._new(
            Meta(tuple(found.shape), tuple(found.stride()), meta.dtype, meta.device),
            copied_on if copies and copied_on else self.slots[source].home,
            fresh=False,
        )
        if copies:
            self._copied(value, slot)
        return replace(part, out=slot)

    def _read(self, value: str, span: Span, launch: int, steps: list[Step]) -> int:
        """The slot of a value's span, cut out of a larger piece where need be."""
        if self.region.values[value].sharing == "shared":
            span = self.everything
        if value in self.layout.summed and span == self.everything:
            slot = self.sums[value][0]
        elif (value, span) in self.at:
            slot = self.at[value, span]
        elif (value, span, self._lane(launch)) in self.made_on:
            slot = self.made_on[value, span, self._lane(launch)]
        elif self.region.values[value].sharing == "partial":
            slot = self._addend(value, span, launch, steps)
        else:
            held = self._holder(value, span)
            slot = source = self.at[value, held]
            if held != span:
                self.slots[source].readers.append(launch)
                part = self._part(value, source, held, span, copied_on=self._lane(launch))
                steps.append(part)
                slot = part.out
                if part.outer == 1:
                    self.at[value, span] = slot
                else:  # other lanes know nothing of this copy
                    self.made_on[value, span, self._lane(launch)] = slot
        self.slots[slot].readers.append(launch)
        return slot

    def _addend(self, value: str, span: Span, launch: int, steps: list[Step]) -> int:
        """What `span` adds to a sum made in other pieces: each counts for its first micro-batch."""
        pieces = [s for s in self.pieces[value] if span[0] <= s[0] < span[1]]
        lane, meta = self._lane(launch), self.slots[self.at[value, self.pieces[value][0]]].meta
        if not pieces:
            slot = self._new(meta, lane)
            zeros = lambda _: (meta.copy_of(torch.zeros_like(meta.empty())),)  # noqa: E731
            steps.append(Run(zeros, (), (slot,)))
        else:
            slot = self.at[value, pieces[0]]
        for piece in pieces[1:]:
            left, right, slot = slot, self.at[value, piece], self._new(meta, lane)
            for read in (left, right):
                self.slots[read].readers.append(launch)
            steps.append(Sum(slot, left, right, in_place=False))
        self.made_on[value, span, lane] = slot
        return slot

    def _put(self, value: str, span: Span, slot: int) -> None:
        self.at[value, span] = slot
        self.pieces.setdefault(value, []).append(span)

    def _holder(self, value: str, span: Span) -> Span:
        if value in self.buffers:
            self.at[value, self.everything] = self.buffers[value]
            return self.everything
        for held in self.pieces.get(value, ()):
            if held[0] <= span[0] and span[1] <= held[1]:
                return held
        kind = self.region.values[value].sharing
        raise SplitError(
            f"{value} ({kind}) is made for single micro-batches and needed for all of them at "
            f"once; it has no batch dimension to join along."
        )

    def _arguments(self, arguments: Sequence[Argument]) -> dict[int, int]:
        places: dict[int, int] = {}
        for argument in arguments:
            slot = self._new(argument.meta, MAIN, fresh=argument.total)
            places[argument.index] = slot
            if argument.total:
                self.sums[argument.value] = (slot, -1)
                self.layout.summed.add(argument.value)
                self.layout.read[argument.value] = {self.everything}
                continue
            if argument.checked:
                self.prologue.append(Restride(slot, slot, argument.meta))
            self._put(argument.value, argument.span, slot)
        self._sum_arguments()
        for value in self.layout.merged:
            spans = [span for span in self.layout.made[value] if (value, span) in self.at]
            for span in spans:  # parts that came in (saved apart) and are read together
                slot = self.at[value, span]
                self._buffer(value, self.slots[slot].meta)
                into = self._into(value, span, self.prologue, None)
                self.prologue.append(Store(into, slot))
                self._copied(value, slot)
        return places

    def _sum_arguments(self) -> None:
        """Addends that came in one by one and are read whole."""
        for value in self.layout.summed:
            spans = [s for s in self.layout.made[value] if (value, s) in self.at]
            for left, right in itertools.pairwise(spans):
                before = self.sums.get(value, (self.at[value, left], -1))[0]
                out = self._new(self.slots[before].meta, MAIN)
                self.prologue.append(Sum(out, before, self.at[value, right], in_place=False))
                self.sums[value] = (out, -1)

    # buffers

    def _buffer(self, value: str, part: Meta) -> int:
        """The buffer of all micro-batches, laid out as one of them is."""
        if value not in self.buffers:
            dim, outer, inner = self._axis(value)
            shape = list(part.shape)
            shape[dim] = outer * inner * self._count(self.everything)
            order = sorted(range(len(shape)), key=lambda d: (-part.stride[d], d))
            packed = row_major(tuple(shape[d] for d in order))
            stride = tuple(packed[order.index(d)] for d in range(len(shape)))
            meta = Meta(tuple(shape), stride, part.dtype, part.device)
            self.buffers[value] = self._new(meta, MAIN)
            self.prologue.append(Alloc(self.buffers[value], meta))
        return self.buffers[value]

    def _into(self, value: str, span: Span, steps: list[Step], launch: int | None) -> int:
        """The slice that `launch` writes; the buffer lives until it has."""
        if launch is not None:
            self.slots[self.buffers[value]].readers.append(launch)
        part = self._part(value, self.buffers[value], self.everything, span)
        steps.append(part)
        self.sliced[part.out] = value
        return part.out
