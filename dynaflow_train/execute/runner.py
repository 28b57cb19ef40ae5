"""Calls of one captured graph: sizes -> plan -> program -> results.

A forward leaves a `Record` of what it ran; its ticket, saved among the tensors, tells the backward
which. Contexts are kept up to a limit, the least recently used goes first.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch
from torch import fx

from dynaflow_train.errors import ScheduleError
from dynaflow_train.execute.build import Builder
from dynaflow_train.execute.emit import emit
from dynaflow_train.execute.graphs import Recorder, Recording, Recordings, Tickets
from dynaflow_train.execute.interpret import interpret
from dynaflow_train.execute.lanes import Lanes, lanes_for
from dynaflow_train.execute.measure import measure
from dynaflow_train.execute.memory import Argument, Result, Setting
from dynaflow_train.execute.meta import NOTHING, Meta
from dynaflow_train.execute.records import MOST_PENDING, Record, Records
from dynaflow_train.ir import Interval, Plan, Region

if TYPE_CHECKING:
    from dynaflow_train.execute.compile import OpCompiler
    from dynaflow_train.execute.exchange import Connect
    from dynaflow_train.execute.groups import Groups
    from dynaflow_train.execute.program import Program

UNKNOWN_PARAMETERS = "it is not known which inputs are parameters, and stay where they are"
RAGGED = "how many rows go to which rank is known at run time only"
MEASURED_CALL = 3  # by then kernels are loaded and the allocator is warm
Symbols = dict[sympy.Symbol, int]
MakePlan = Callable[[Region, Symbols, int, "tuple[int, ...] | None"], Plan]


@dataclass
class Entry:
    """One context that ran: its plan and how it is run.

    Attributes:
        call: arguments -> results.
        source: text of the fast path, or None for the interpreter.
        ticket: what the forward saves to find this entry's record again.
        recordings: of its calls as CUDA graphs, where they are asked for.
        calls: how often it ran.
        intervals: times of its launches in its third call, which is measured.
    """

    plan: Plan
    program: Program
    lanes: Lanes
    call: Callable[[list[Any]], list[Any]]
    source: str | None
    ticket: torch.Tensor | None = None
    recordings: Recordings | None = None
    calls: int = 0
    intervals: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class GraphFacts:
    """What the runner needs of a captured graph.

    Attributes:
        graph: the graph; placeholders in call order.
        region: what it was cut into.
        batch: the symbol of the batch size, or None.
        num_outputs: results before the saved ones (all of them in a backward).
        saved, slotted, count, ticketed, others: see `capture.slots.Slots`; empty without slots.
        is_size: see `specialise.Sizes`.
        parameters: places of a forward's parameters among the placeholders; None if not known.
        totals: results of a backward that may be added to what a call brings behind the
            placeholders' arguments: for each a tensor, or None for a plain result.
    """

    graph: fx.Graph
    region: Region
    batch: sympy.Symbol | None
    num_outputs: int
    saved: tuple[str, ...] = ()
    slotted: tuple[str, ...] = ()
    count: int = 1
    ticketed: bool = False
    is_size: Callable[[fx.Node], bool] = lambda node: False
    parameters: tuple[int, ...] | None = None
    totals: tuple[str, ...] = ()

    @property
    def placeholders(self) -> list[fx.Node]:
        """The graph's inputs."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def outputs(self) -> list[Any]:
        """The graph's outputs."""
        return list(cast("Any", self.graph.output_node().args[0]))


@dataclass
class Runner:
    """A boxed callable for one graph.

    Attributes:
        make_plan: (region, symbols, batch, forward sizes) -> plan, the same on all ranks.
        groups: of streams with options; shared by all runners of a session.
        fast: the fast path, else the interpreter.
        dynamic: a new plan for every call.
        max_contexts: how many contexts are kept.
        records: of the forward; shared with the backward's runner, and by all candidates.
        candidate: which of several strategies it runs.
        recorder: device -> what records calls there, or None.
        connector: device -> gives memory for collectives by copies, or None.
    """

    facts: GraphFacts
    compiler: OpCompiler
    make_plan: MakePlan
    kernel: Callable[..., Any]
    groups: Groups
    fast: bool = True
    dynamic: bool = False
    max_contexts: int = 16
    records: Records = field(default_factory=Records)
    candidate: int = 0
    recorder: Callable[[torch.device], Recorder | None] = lambda device: None
    connector: Callable[[torch.device], Connect | None] = lambda device: None
    entries: OrderedDict[Any, Entry] = field(default_factory=OrderedDict)
    streams: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._boxed_call = True
        self._backward = self.facts.region.phase == "backward"
        nodes = self.facts.placeholders
        self._sizes = [
            (i, n.meta["val"].node.expr)
            for i, n in enumerate(nodes)
            if isinstance(n.meta.get("val"), torch.SymInt)
        ]
        slots = [i for i, n in enumerate(nodes) if n.name.startswith("dynaflow_slot_")]
        self._ticket_at = slots[-1] if slots and self._backward else None

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run one call; `arguments` is emptied."""
        entry = self.entry(arguments)
        entry.calls += 1
        if entry.calls == MEASURED_CALL and not _is_capturing():
            results, entry.intervals = measure(entry.program, entry.lanes, arguments)
            return results
        return self.run(entry, entry.calls, arguments)

    def run(self, entry: Entry, calls: int, arguments: list[Any]) -> list[Any]:
        """Run one call of a context that ran `calls` times, this one included."""
        recording = self._recording(entry, calls, arguments)
        return entry.call(arguments) if recording is None else recording.run(arguments)

    def _recording(self, entry: Entry, calls: int, arguments: list[Any]) -> Recording | None:
        """What is replayed in place of a call: of a backward, if its forward was replayed."""
        if entry.recordings is None or _is_capturing():
            return None
        if not self._backward:
            return entry.recordings.find(entry.call, calls, arguments)
        ticket = self._ticket(arguments)
        if ticket not in self.records.live or not self.records[ticket].recorded:
            return None
        self.records.followers.setdefault(ticket, entry.recordings)
        return entry.recordings.find(entry.call, calls, arguments, ticket)

    def context(self, arguments: list[Any]) -> tuple[Any, ...]:
        """The sizes that tell contexts apart."""
        return tuple(arguments[i] for i, _ in self._sizes)

    def _brought(self, arguments: list[Any]) -> dict[str, int]:
        first = len(arguments) - len(self.facts.totals)
        return {n: i for i, n in enumerate(self.facts.totals, first) if arguments[i] is not None}

    def _ticket(self, arguments: list[Any]) -> int:
        return -1 if self._ticket_at is None else int(arguments[self._ticket_at])

    def record_of(self, arguments: list[Any]) -> Record | None:
        """The record of the forward whose backward is called with `arguments`, if it left one.

        Raises:
            ScheduleError: so many forwards came since that it is gone.
        """
        ticket = self._ticket(arguments)
        at = ticket if ticket >= 0 else self._unticketed(self._symbols(arguments))
        if ticket >= 0 and at not in self.records:
            raise ScheduleError(
                f"{self.facts.region.name}: the plan of forward {ticket} is gone; the last "
                f"{MOST_PENDING} are kept. Run its backward sooner."
            )
        return self.records.get(at)

    def release(self) -> None:
        """Let the memory of recorded calls go; what is in flight keeps its own."""
        for entry in self.entries.values():
            if entry.recordings is not None:
                entry.recordings.forget()

    def drop(self, context: tuple[Any, ...]) -> None:
        """Forget how a context is run, which another candidate runs from now on."""
        for key, entry in list(self.entries.items()):
            record = self.records.get(key[1])
            if (record.context if record and self._backward else key[0]) == context:
                self._retire(entry)
                del self.entries[key]

    def entry(self, arguments: list[Any]) -> Entry:
        """The context of these arguments, made if it is new."""
        ticket = self._ticket(arguments)
        base = self.records[ticket].base if ticket in self.records else ticket
        key = (self.context(arguments), base, *self._brought(arguments))
        found = self.entries.get(key)
        if found is not None and not (self.dynamic and not self._backward):
            self.entries.move_to_end(key)
            return found
        with torch.no_grad():
            entry = self._make(arguments)
        if self.dynamic and found is not None and entry.plan == found.plan:
            self._retire(entry)
            return found
        if found is not None:
            self._retire(found)
        self.entries[key] = entry
        while len(self.entries) > self.max_contexts:
            self._retire(self.entries.popitem(last=False)[1])
        return entry

    def _retire(self, entry: Entry) -> None:
        if entry.ticket is not None:
            self.records.live.discard(int(entry.ticket))
        if entry.recordings is not None:
            entry.recordings.forget()

    def _symbols(self, arguments: list[Any]) -> Symbols:
        symbols = {
            expr: int(arguments[i]) for i, expr in self._sizes if isinstance(expr, sympy.Symbol)
        }
        for node, value in zip(self.facts.placeholders, arguments, strict=False):
            shape: Any = getattr(node.meta.get("val"), "shape", ())
            for traced, real in zip(shape, getattr(value, "shape", ()), strict=False):
                symbol = traced.node.expr if isinstance(traced, torch.SymInt) else None
                if isinstance(symbol, sympy.Symbol):
                    symbols.setdefault(symbol, int(real))
        return symbols

    def _make(self, arguments: list[Any]) -> Entry:
        symbols = self._symbols(arguments)
        record = self.record_of(arguments) if self._backward else None
        batch = symbols.get(self.facts.batch, 1) if self.facts.batch is not None else 1
        plan = self.make_plan(
            self.facts.region, symbols, batch, record.plan.sizes if record else None
        )
        device = next(
            (a.device for a in arguments if isinstance(a, torch.Tensor) and a.device.type != "cpu"),
            torch.device("cpu"),
        )
        facts, groups = self.facts, self.groups.of(plan, self.facts.region, device)
        setting = Setting(
            symbols, facts.batch, facts.is_size, self.compiler, self.kernel, device, groups,
            self.connector(device),
        )  # fmt: skip
        ticketed = not self._backward and self.facts.ticketed
        number = self.records.new() if ticketed else None
        tensor = None if number is None else torch.tensor(number, dtype=torch.int64)
        builder = Builder(self.facts.region, plan, setting)
        brought = self._brought(arguments)
        results = [Result() if r.value in brought else r for r in self._results(symbols, tensor)]
        program = builder.build(self._arguments(arguments, record, len(plan.sizes)), results)
        if not self._backward and self.facts.saved:
            at = number if number is not None else self._unticketed(symbols)
            context = self.context(arguments)
            self.records[at] = self._record(plan, builder, program, context, at)
            if number is not None:
                self.records.live.add(number)
                self.records.forget()
        lanes = lanes_for(program.blocks, device, self.streams, self.groups.priorities)
        call, source = functools.partial(interpret, program, lanes), None
        if self.fast:
            call, source = emit(program, lanes)
        return Entry(plan, program, lanes, call, source, tensor, self._recordings(program, tensor))

    def _recordings(self, program: Program, ticket: torch.Tensor | None) -> Recordings | None:
        recorder = None if self.dynamic else self.recorder(program.device)
        if recorder is None:
            return None
        used = frozenset(program.arguments)
        if any(op.ragged for op in self.facts.region.ops):
            return Recordings(recorder, used, why_not=RAGGED)
        if ticket is None:
            return Recordings(recorder, used)

        def new() -> torch.Tensor:
            number = self.records.new()
            self.records[number] = replace(self.records[int(ticket)], recorded=True)
            self.records.live.add(number)
            return torch.tensor(number, dtype=torch.int64)

        def forget(ticket: torch.Tensor) -> None:
            self.records.drop(int(ticket))

        tickets, known = Tickets(ticket, new, forget), self.facts.parameters
        if known is None:
            return Recordings(recorder, used, tickets=tickets, why_not=UNKNOWN_PARAMETERS)
        parameters = tuple(i for i in known if i in used)
        return Recordings(recorder, used, parameters, tickets)

    def _unticketed(self, symbols: Symbols) -> int:
        """A record's key where there is one plan for each set of sizes."""
        return -2 - (hash(tuple(sorted((str(k), v) for k, v in symbols.items()))) & 0xFFFFFFFF)

    def _record(
        self, plan: Plan, builder: Builder, program: Program, context: tuple[Any, ...], at: int
    ) -> Record:
        spans = {name: program.spans[name] for name in self.facts.saved}
        metas = {
            (name, piece): builder.slots[builder.at[name, span]].meta
            for name, pieces in spans.items()
            for piece, span in enumerate(pieces)
        }
        return Record(plan, spans, metas, context, self.candidate, at)

    def _arguments(self, arguments: list[Any], record: Record | None, parts: int) -> list[Argument]:
        nodes, found = self.facts.placeholders, []
        everything = (0, parts)
        saved = dict(zip(self.saved_places, self.facts.saved, strict=False))
        slot_of = {name: k for k, name in enumerate(self.facts.slotted)}
        first_slot = next(
            (i for i, n in enumerate(nodes) if n.name.startswith("dynaflow_slot_")), 0
        )
        for index, (node, value) in enumerate(zip(nodes, arguments, strict=False)):
            if isinstance(node.meta.get("val"), torch.SymInt):
                continue
            if not isinstance(value, torch.Tensor):  # opaque (a mesh): only handed through
                found.append(Argument(index, node.name, everything, NOTHING))
                continue
            if node.name.startswith("dynaflow_slot_"):
                continue
            name = saved.get(index)
            if name in slot_of and record is not None:
                at = first_slot + slot_of[name] * (self.facts.count - 1)
                for piece, span in enumerate(record.spans[name]):
                    place = index if piece == 0 else at + piece - 1
                    found.append(
                        Argument(place, node.name, span, record.metas[name, piece], checked=True)
                    )
            else:
                meta = Meta.of(value)
                if name is not None and record is not None:
                    meta = record.metas.get((name, 0), meta)
                found.append(Argument(index, node.name, everything, meta, checked=name is not None))
        for name, index in self._brought(arguments).items():
            meta = Meta.of(arguments[index])
            found.append(Argument(index, name, everything, meta, total=True))
        return found

    @property
    def saved_places(self) -> range:
        """Where the saved tensors stand among a backward's inputs: behind the sizes."""
        if not self._backward:
            return range(0)
        return range(len(self._sizes), len(self._sizes) + len(self.facts.saved))

    def _results(self, symbols: Symbols, ticket: torch.Tensor | None) -> list[Result]:
        facts, outputs = self.facts, self.facts.outputs
        results = [_whole(o, symbols) for o in outputs[: facts.num_outputs]]
        if self._backward:
            return results
        end = facts.num_outputs + len(facts.saved)
        results += [Result(n, piece=0) if n in facts.slotted else Result(n) for n in facts.saved]
        if facts.ticketed:
            by_name = {o.name: o for o in outputs[facts.num_outputs : end]}
            for name in facts.slotted:
                like = by_name[name].meta["val"]
                empty = torch.empty(0, dtype=like.dtype, device=like.device)
                results += [Result(name, piece=k, constant=empty) for k in range(1, facts.count)]
            results.append(Result(constant=ticket))
            end += len(facts.slotted) * (facts.count - 1) + 1
        return results + [_whole(o, symbols) for o in outputs[end:]]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _whole(output: Any, symbols: Symbols) -> Result:
    if not isinstance(output, fx.Node):
        return Result(constant=output)
    value = output.meta.get("val")
    if isinstance(value, torch.SymInt):
        return Result(constant=int(value.node.expr.xreplace(symbols)))
    return Result(output.name)
