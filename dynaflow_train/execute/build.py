"""Plan + region + metas -> Program: every slot, view, buffer, sum and drop decided beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dynaflow_train.clocks import Clocks, input_launches
from dynaflow_train.execute import program as p
from dynaflow_train.execute.communicate import Communication
from dynaflow_train.execute.exchange import exchanges
from dynaflow_train.execute.layout import Span, lay_out, span_of
from dynaflow_train.execute.program import MAIN, Block, Program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynaflow_train.execute.compile import CompiledOp
    from dynaflow_train.execute.memory import Argument, Result
    from dynaflow_train.execute.meta import Meta
    from dynaflow_train.execute.specialise import Operand
    from dynaflow_train.ir import Launch, Op


class Builder(Communication):
    """Builds one Program; `build` is the entry."""

    def build(self, arguments: Sequence[Argument], results: Sequence[Result]) -> Program:
        """Decide everything.

        Raises:
            SplitError: a value that each micro-batch has for itself is needed whole.
        """
        given: dict[str, list[Span]] = {}
        for argument in arguments:
            given.setdefault(argument.value, []).append(argument.span)
        wanted = {r.value for r in results if r.value and r.piece is None}
        self.saved_apart = {r.value for r in results if r.value and r.piece is not None}
        self.layout = lay_out(
            self.region, self.plan, {k: tuple(v) for k, v in given.items()}, wanted
        )
        places = self._arguments(arguments)
        if self.setting.connect is not None:
            connect = self.setting.connect
            self.exchanged = exchanges(self.region, self.plan, connect, self._sizes_at)
        blocks = [self._block(i, launch) for i, launch in enumerate(self.plan.launches)]
        epilogue: list[p.Step] = []
        found = [self._result(result, epilogue) for result in results]
        blocks = self._waits(blocks)
        self._drops(blocks)
        kept = {r for r in found if isinstance(r, int)}
        return Program(
            self.plan,
            self.region,
            self.setting.device,
            len(self.slots),
            places,
            tuple(self.prologue),
            tuple(blocks),
            tuple(epilogue),
            tuple(found),
            frozenset(s for s in kept if self.slots[s].home != MAIN),
            {name: tuple(spans) for name, spans in self.layout.made.items()},
            self.copies,
        )

    # launches

    def _block(self, position: int, launch: Launch) -> Block:
        block = Block(position, launch.stream, launch.waits)
        span = span_of(launch.micro_batches)
        op = self.region.op[launch.ops[0]]
        if launch.kernel is not None:
            self._kernel(block, launch, span)
        elif op.is_communication and op.ragged:
            self._send_rows(block, op, self.everything if op.merged else span)
            block.is_collective = True
        elif op.is_communication and self._collective(block, op, span):
            block.is_collective = True
        else:
            self._compute(block, op, self.everything if op.merged else span)
        return block

    def _compute(self, block: Block, op: Op, span: Span) -> None:
        read = [self._addends(v, span, block) for v in op.inputs]
        inputs = [slot for slots in read for slot in slots]
        metas, sizes = [self._operand(slots) for slots in read], self._sizes(span)
        plain = self.setting.compiler.compile(op, metas, sizes, {})
        stores: dict[int, int] = {}
        parts: dict[int, tuple[int, int]] = {}
        for index, value in enumerate(op.outputs):
            target, reader = self._target(value, block), self._exchanged_by(value, span)
            if reader is not None and plain.outputs[index].is_contiguous:
                stores[index] = self._lend(block, reader, plain.outputs[index])
                if index in plain.factors and self._in_chunks(block, reader):
                    left, right = (self._new(m, block.lane) for m in plain.factors[index])
                    parts[index] = left, right
            elif target is not None:
                self._buffer(target, plain.outputs[index])
                into = self._into(target, span, block.steps, block.launch)
                whole = len(self.slots[into].meta.shape) == len(plain.outputs[index].shape)
                if whole and self.setting.compiler.direct:
                    stores[index] = into
                else:  # rows of the micro-batch stand apart in the buffer
                    block.steps.append(p.Store(into, index))
                    self._copied(value, into)
        added = self._sums_to_add_to(block, op, plain)
        stores = dict(sorted((stores | added).items()))
        slices = {i: None if i in parts else self.slots[s].meta for i, s in stores.items()}
        compiled = plain
        if stores:
            compiled = self.setting.compiler.compile(op, metas, sizes, slices, tuple(added))
        for index in compiled.copied:
            self._copied(op.outputs[index], stores[index])
        made = list(zip(op.outputs, compiled.outputs, compiled.fresh, strict=True))
        outputs = self._outputs(block, span, made, stores, inputs)
        returned = [
            parts.get(i, (s,)) for i, s in enumerate(outputs) if i in parts or i not in stores
        ]
        into = (slot for i, slot in stores.items() if i not in parts)
        run = p.Run(compiled.call, (*inputs, *into), tuple(s for each in returned for s in each))
        late = [s for s in block.steps if isinstance(s, p.Store)]
        block.steps[:] = [s for s in block.steps if not isinstance(s, p.Store)]
        block.steps.append(run)
        block.steps += [replace(store, source=outputs[store.source]) for store in late]
        block.steps += [self._product(block, stores[i], factors) for i, factors in parts.items()]
        rest = [i for i in range(len(outputs)) if i not in added]
        self._add_up(block, [(op.outputs[i], outputs[i]) for i in rest])

    def _addends(self, value: str, span: Span, block: Block) -> tuple[int, ...]:
        """The slot of what an op reads, or of the two that it adds up itself."""
        slot = self._read(value, span, block.launch, block.steps)
        return (slot, self.addends[slot]) if slot in self.addends else (slot,)

    def _operand(self, slots: Sequence[int]) -> Operand:
        metas = [self.slots[slot].meta for slot in slots]
        return metas[0] if len(metas) == 1 else tuple(metas)

    def _sums_to_add_to(self, block: Block, op: Op, plain: CompiledOp) -> dict[int, int]:
        """Partial outputs that the op itself can add to the micro-batches before: index -> slot."""
        found: dict[int, int] = {}
        for index, value in enumerate(op.outputs):
            left, before = self.sums.get(value, (None, -1))
            if left is None or value not in self.layout.summed or not self._is_addable(value, left):
                continue
            if self.slots[left].meta.shape == plain.outputs[index].shape:
                found[index] = left
                self.slots[left].readers.append(block.launch)
                self._add_after(block, value, left, before)
        return found

    def _target(self, value: str, block: Block) -> str | None:
        """The buffered value that `value` is a part of: itself, or what is reduced in its place."""
        if value in self.layout.merged:
            return value
        reader = self._only_reader(value)
        if reader is not None and reader.collective == "all_reduce":
            return reader.outputs[0] if reader.outputs[0] in self.layout.merged else None
        return None

    def _outputs(
        self,
        block: Block,
        span: Span,
        made: Sequence[tuple[str, Meta, bool]],
        stores: Mapping[int, int],
        inputs: Sequence[int],
    ) -> list[int]:
        """Slots for values with their metas and whether they are fresh."""
        homes = {self.slots[s].home for s in inputs} | {block.lane}
        found: list[int] = []
        for index, (value, meta, fresh) in enumerate(made):
            if index in stores:
                slot = stores[index]
            else:
                slot = self._new(meta, block.lane, fresh=fresh)
                # A view keeps another slot's memory: unless all are of one lane, to the end.
                self.slots[slot].kept = not fresh and len(homes) > 1
            self._put(value, span, slot)
            found.append(slot)
        return found

    def _kernel(self, block: Block, launch: Launch, span: Span) -> None:
        ops = [self.region.op[name] for name in launch.ops]
        inside = {v for op in ops for v in op.outputs}
        wanted = [v for v in dict.fromkeys(v for op in ops for v in op.inputs) if v not in inside]
        inputs = [self._read(v, span, block.launch, block.steps) for v in wanted]
        read = {*self.layout.readers, *self.region.outputs}
        outputs = [v for op in ops for v in op.outputs if v in read]
        known = [self.slots[s].meta for s in inputs]
        sizes, device = self._sizes(span), self.setting.device
        function, found = self.setting.kernel(launch, ops, (wanted, outputs), known, sizes, device)
        made = [(value, *each) for value, each in zip(outputs, found, strict=True)]
        slots = self._outputs(block, span, made, {}, inputs)
        block.steps.append(p.Run(function, tuple(inputs), tuple(slots)))
        for value, slot in zip(outputs, slots, strict=True):
            if value in self.layout.merged:
                self._buffer(value, self.slots[slot].meta)
                into = self._into(value, span, block.steps, block.launch)
                block.steps.append(p.Store(into, slot))
                self._copied(value, slot)
        self._add_up(block, zip(outputs, slots, strict=True))

    # the end

    def _result(self, result: Result, epilogue: list[p.Step]) -> int | p.Constant:
        if result.value is None:
            return p.Constant(result.constant)
        span = self.everything
        if result.piece is not None:
            made = self.layout.made[result.value]
            if result.piece >= len(made):
                return p.Constant(result.constant)
            span = made[result.piece]
        slot = self._read(result.value, span, len(self.plan.launches), epilogue)
        self.slots[slot].kept = True
        return slot

    def _waits(self, blocks: list[Block]) -> list[Block]:
        """Add the waits of sums, and note which launches are awaited on another lane."""
        for block in blocks:
            waits = set(block.waits) | self.extra_waits.get(block.launch, set())
            block.waits = tuple(sorted(waits - {self.producer.get(block.launch, -1)}))
        reads = input_launches(self.plan, self.region)
        for block in blocks:
            sources = [blocks[at] for at in sorted(reads[block.launch])]
            own = [b.launch for b in sources if b.is_collective and b.lane == block.lane]
            block.own_waits = tuple(own)
        awaited = {w for block in blocks for w in block.waits}
        for block in blocks:
            block.awaited = block.launch in awaited
        return blocks

    def _drops(self, blocks: list[Block]) -> None:
        """Drop each slot as soon as the lane of its memory is past all its readers."""
        clocks = Clocks(self.plan.launches)
        for number, slot in enumerate(self.slots):
            if slot.kept or not slot.readers or len(blocks) in slot.readers:
                continue  # results; and what nobody reads goes when the call returns
            last = max(slot.readers)
            if all(self.plan.launches[r].stream == slot.home for r in slot.readers):
                blocks[last].drops_after.append(number)
                continue
            others = {r for r in slot.readers if self.plan.launches[r].stream != slot.home}
            at = max(last + 1, *(clocks.first_known(r, slot.home) for r in others))
            if at < len(blocks):
                blocks[at].drops.append(number)
