"""How a program communicates and adds up: collectives, exchanges by copies, micro-batches' sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from dynaflow_train.execute import program as p
from dynaflow_train.execute.collectives import bind, bind_rows
from dynaflow_train.execute.layout import Span, span_of
from dynaflow_train.execute.memory import Memory, Setting
from dynaflow_train.execute.meta import Meta, row_major
from dynaflow_train.execute.specialise import Sizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynaflow_train.execute.collectives import Collective
    from dynaflow_train.execute.compile import Function
    from dynaflow_train.execute.exchange import Exchange
    from dynaflow_train.execute.program import Block
    from dynaflow_train.ir import Op, Plan, Region


class Communication(Memory):
    """The communicating half of a program while it is built."""

    def __init__(self, region: Region, plan: Plan, setting: Setting) -> None:
        super().__init__(region, plan, setting)
        self.extra_waits: dict[int, set[int]] = {}
        self.saved_apart: set[str] = set()  # results wanted piece by piece: never added into
        self.exchanged: dict[int, Exchange] = {}
        self.lent: dict[int, int] = {}  # exchanged launch -> the slot of its operand's buffer
        self.chunked: dict[int, tuple[Function, Collective]] = {}  # by the exchanged launch
        self.producer: dict[int, int] = {}  # such a launch -> who makes its operand part by part
        self.addends: dict[int, int] = {}  # pulled operand -> this rank's, to be added by who reads

    def _sizes(self, span: Span) -> Sizes:
        part = dict(self.setting.symbols)
        if self.setting.batch is not None:
            part[self.setting.batch] = self._count(span)
        return Sizes(part, self.setting.symbols, self.setting.is_size)

    def _sizes_at(self, position: int) -> Sizes:
        launch = self.plan.launches[position]
        whole = self.region.op[launch.ops[0]].merged
        return self._sizes(self.everything if whole else span_of(launch.micro_batches))

    def _is_addable(self, value: str, left: int) -> bool:
        """Whether a sum may be added to in place: nobody else sees what it holds by now."""
        known, alone = self.slots[left], self.layout.read[value] == {self.everything}
        alone = alone and value not in self.saved_apart  # the backward wants the addends
        return known.fresh and alone and not known.meta.is_expanded

    def _add_after(self, block: Block, value: str, out: int, before: int) -> None:
        if before >= 0 and self.plan.launches[before].stream != block.lane:
            self.extra_waits.setdefault(block.launch, set()).add(before)
        self.sums[value] = (out, block.launch)

    def _exchanged_by(self, value: str, span: Span) -> int | None:
        """The exchanged launch that alone reads this part of a value."""
        if value in self.layout.merged or self._only_reader(value) is None:
            return None
        for at in self.layout.readers[value]:
            if at in self.exchanged and span_of(self.plan.launches[at].micro_batches) == span:
                return at
        return None

    def _lend(self, block: Block, at: int, meta: Meta) -> int:
        """A slot for the operand of an exchanged launch, in memory that other ranks read."""
        exchange = self.exchanged[at]
        slot = self.lent[at] = self._new(meta, block.lane)
        self.slots[slot].kept = True
        tensor = exchange.ring.view(exchange.ring.rank, exchange.number, meta)
        block.steps.append(p.Lend(slot, tensor))
        elsewhere = {at for at in exchange.after if self.plan.launches[at].stream != block.lane}
        self.extra_waits.setdefault(block.launch, set()).update(elsewhere)
        return slot

    def _in_chunks(self, block: Block, at: int) -> bool:
        """Whether the operand of an exchanged launch is made in parts; decides how."""
        exchange = self.exchanged[at]
        ring, lane = exchange.ring, self.plan.launches[at].stream
        if lane == block.lane or ring.chunks < 2 or not exchange.reduces_two:
            return False
        meta = self.slots[self.lent[at]].meta
        add = exchange.reader is None
        self.chunked[at] = ring.in_chunks(exchange.number, meta, add=add, last=exchange.last)
        self.producer[at] = block.launch
        return True

    def _product(self, block: Block, out: int, factors: tuple[int, int]) -> p.Run:
        """The product into a lent buffer, part by part."""
        at = next(at for at, slot in self.lent.items() if slot == out)
        for slot in factors:
            self.slots[slot].readers.append(block.launch)
        return p.Run(self.chunked[at][0], (*factors, out), ())

    def _exchange(self, block: Block, op: Op, span: Span) -> None:
        """A collective by copies."""
        source = self._read(op.inputs[0], span, block.launch, block.steps)
        exchange, value = self.exchanged[block.launch], op.outputs[0]
        if self.lent.get(block.launch) != source:
            meta = self.slots[source].meta
            lent = self._lend(block, block.launch, replace(meta, stride=row_major(meta.shape)))
            block.steps.append(p.Store(lent, source))
            self._copied(op.inputs[0], lent)
            source = lent
        out, into = self._collective_output(block, op, span, source, in_place=False)
        kind = exchange.kind
        if exchange.reader is not None and into is None:
            kind, self.addends[out] = "pull", source
        if block.launch in self.chunked and into is None:
            function = self.chunked[block.launch][1]
        else:
            self.producer.pop(block.launch, None)
            function = exchange.ring.collective(
                kind, exchange.number, self.slots[source].meta, last=exchange.last
            )
        self._communicate(block, function, value, source, (out, into))

    def _communicate(
        self,
        block: Block,
        function: Collective,
        value: str,
        source: int,
        places: tuple[int, int | None],
    ) -> None:
        """Launch a collective, and what follows it in its block."""
        out, into = places
        block.steps.append(p.Communicate(function, source, out, blocking=into is not None))
        self.slots[out].readers.append(block.launch)
        if into is not None:
            block.steps.append(p.Store(into, out))
            self._copied(value, into)
        self._add_up(block, [(value, out)])

    def _only_reader(self, value: str) -> Op | None:
        """The op that alone reads a value, which then may overwrite it."""
        names = {self.plan.launches[p].ops[0] for p in self.layout.readers.get(value, ())}
        kept = value in self.region.outputs or value in self.layout.summed
        if len(names) != 1 or kept or value not in self.region.producer:
            return None
        return self.region.op[next(iter(names))]

    def _add_up(self, block: Block, made: Iterable[tuple[str, int]]) -> None:
        """Add partial values in their slots to the sums of the micro-batches before."""
        for value, slot in made:
            if value not in self.layout.summed:
                continue
            if value not in self.sums:
                self.sums[value] = (slot, block.launch)
                continue
            left, before = self.sums[value]
            in_place = self._is_addable(value, left)
            out = left if in_place else self._new(self.slots[left].meta, block.lane)
            block.steps.append(p.Sum(out, left, slot, in_place))
            self.slots[left].readers.append(block.launch)
            self.slots[slot].readers.append(block.launch)
            self._add_after(block, value, out, before)

    def _collective(self, block: Block, op: Op, span: Span) -> bool:
        span = self.everything if op.merged else span
        assert op.graph is not None, "ops of a plan's text are never run"
        if block.launch in self.exchanged:
            self._exchange(block, op, span)
            return True
        node = next(n for n in op.graph.graph.nodes if n.op == "call_function")
        full = self._sizes(span)
        arguments = [
            full.number(a.meta["val"] if isinstance(a, fx.Node) else a, size=False)
            for a in node.args
        ]
        own = self.setting.groups.get((block.lane, str(op.group)))
        function = bind(node, arguments, own)
        if function is None or len(op.inputs) != 1 or len(op.outputs) != 1:
            return False
        source, value = self._read(op.inputs[0], span, block.launch, block.steps), op.outputs[0]
        meta = self.slots[source].meta
        if not meta.is_contiguous:
            packed = replace(meta, stride=row_major(meta.shape))
            restride = p.Restride(self._new(packed, block.lane), source, packed)
            block.steps.append(restride)
            source, meta = restride.out, packed
            self._copied(op.inputs[0], source)
        reads = op.collective == "all_reduce"
        merged, fresh = value in self.layout.merged, self.slots[source].fresh
        usable = self.sliced.get(source) == value if merged else fresh
        in_place = reads and usable and self._only_reader(op.inputs[0]) is op
        out, into = self._collective_output(block, op, span, source, in_place=in_place)
        if reads and not in_place:
            block.steps.append(p.Store(out, source))
            self._copied(value, out)
        self._communicate(block, function, value, source, (out, into))
        return True

    def _send_rows(self, block: Block, op: Op, span: Span) -> None:
        """A collective whose output has a size that is known when it is launched."""
        assert op.graph is not None, "ops of a plan's text are never run"
        node = next(n for n in op.graph.graph.nodes if n.op == "call_function")
        inputs = [self._read(v, span, block.launch, block.steps) for v in op.inputs]
        metas = [self.slots[s].meta for s in inputs]
        meta = self.setting.compiler.compile(op, metas, self._sizes(span), {}).outputs[0]
        out = self._new(meta, block.lane)
        function = bind_rows(node, self.setting.groups.get((block.lane, str(op.group))))
        block.steps.append(p.SendRows(function, tuple(inputs), out))
        self._put(op.outputs[0], span, out)

    def _collective_output(
        self, block: Block, op: Op, span: Span, source: int, *, in_place: bool
    ) -> tuple[int, int | None]:
        """The slot that is written, and the slice it is copied to where that is strided."""
        value, into = op.outputs[0], None
        if in_place:
            out = self._new(self.slots[source].meta, self.slots[source].home)
            block.steps.append(p.Alias(out, source))
            self._put(value, span, out)
            return out, None
        metas = [self.slots[source].meta]
        meta = self.setting.compiler.compile(op, metas, self._sizes(span), {}).outputs[0]
        if value in self.layout.merged:
            self._buffer(value, meta)
            into = self._into(value, span, block.steps, block.launch)
            if self.slots[into].meta.is_contiguous:
                self._put(value, span, into)
                return into, None
        out = self._new(meta, block.lane)
        block.steps.append(p.Alloc(out, meta))
        self._put(value, span, out)
        return out, into
