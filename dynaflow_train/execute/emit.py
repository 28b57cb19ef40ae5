"""Writes a program as straight-line Python: the fast path.

Slots become local variables, views and calls become statements, lanes are entered only where the
lane changes. The text is kept (`source`), so that a person can read what runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynaflow_train.execute import program as p
from dynaflow_train.execute.program import MAIN, Block, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dynaflow_train.execute.lanes import Lanes


class _Writer:
    def __init__(self, program: Program, lanes: Lanes) -> None:
        self.program, self.lanes = program, lanes
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"L": lanes}
        self.lane = MAIN

    def bind(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def step(self, step: p.Step, last: Collection[int] = ()) -> None:
        """One statement; a collective leaves its Work in `w`.

        Args:
            step: what to do.
            last: slots that nobody reads afterwards: an op may free them while it runs.
        """
        match step:
            case p.Run():
                self.run(step, last)
            case p.Part(out=out, source=source) if step.outer == 1:
                at, size = step.start * step.inner, step.length * step.inner
                self.lines.append(f"s{out} = s{source}.narrow({step.dim}, {at}, {size})")
            case p.Part(out=out, source=source):
                self.lines.append(f"s{out} = {self.bind('p', step)}.apply(s{source})")
            case p.Communicate(function, source, out, blocking):
                name, asks = self.bind("c", function), self.lanes.asynchronous and not blocking
                self.lines.append(f"w = {name}(s{source}, s{out}, {asks})")
            case p.SendRows(function, inputs, out):
                name, given = self.bind("c", function), ", ".join(f"s{i}" for i in inputs)
                self.lines.append(f"s{out}, w = {name}([{given}], {self.lanes.asynchronous})")
            case p.Sum(out, left, right, in_place):
                right_side = f"s{left}.add_(s{right})" if in_place else f"s{left} + s{right}"
                self.lines.append(f"s{out} = {right_side}")
            case p.Alias() | p.Alloc() | p.Lend():
                self.lines.append(f"s{step.out} = {self.memory(step)}")
            case p.Store(into, source):
                self.lines.append(f"s{into}.copy_(s{source}.reshape(s{into}.shape))")
            case p.Restride(out, source, meta):
                made = self.bind("m", meta)
                self.lines.append(
                    f"s{out} = s{source} if {made}.fits(s{source}) else {made}.copy_of(s{source})"
                )

    def memory(self, step: p.Alias | p.Alloc | p.Lend) -> str:
        """Where a tensor comes from that nothing is written to yet."""
        match step:
            case p.Alias(source=source):
                return f"s{source}"
            case p.Alloc(meta=meta):
                return f"{self.bind('m', meta)}.empty()"
            case p.Lend(tensor=tensor):
                return self.bind("t", tensor)

    def run(self, step: p.Run, last: Collection[int]) -> None:
        """An op's call; it alone holds the tensors of the `last` slots."""
        given = f"[{', '.join(f's{i}' for i in step.inputs)}]"
        handed = [i for i in dict.fromkeys(step.inputs) if i in last]
        if handed:
            self.lines.append(f"x = {given}")
            self.drop(handed)
        call = f"{self.bind('f', step.function)}({'x' if handed else given})"
        names = "".join(f"s{o}, " for o in step.outputs)
        self.lines.append(f"{names}= {call}" if names else call)
        if handed:
            self.lines.append("x = None")

    def block(self, block: Block) -> None:
        self.drop(block.drops)
        if block.lane != self.lane:
            self.lines.append(f"L.enter({block.lane!r})")
            self.lane = block.lane
        own = block.own_waits if self.lanes.asynchronous else ()
        for launch in (*own, *block.waits):
            self.lines.append(f"L.wait({block.lane!r}, {launch})")
        for at, step in enumerate(block.steps):
            later = {slot for after in block.steps[at + 1 :] for slot in p.reads(after)}
            self.step(step, set(block.drops_after) - later)
        if block.awaited or block.is_collective:
            work = "w" if block.is_collective else "None"
            self.lines.append(
                f"L.issued({block.lane!r}, {block.launch}, {work}, awaited={block.awaited})"
            )
        self.drop(block.drops_after)

    def drop(self, slots: Sequence[int]) -> None:
        if slots:
            self.lines.append("".join(f"s{s} = " for s in slots) + "None")


def emit(program: Program, lanes: Lanes) -> tuple[Callable[[list[Any]], list[Any]], str]:
    """The program as `run(arguments) -> results`, and its source text.

    The function does what `interpret` does, in the same order.
    """
    writer = _Writer(program, lanes)
    for index, slot in program.arguments.items():
        writer.lines.append(f"s{slot} = a[{index}]")
    writer.lines.append("a.clear()")
    for step in program.prologue:
        writer.step(step)
    writer.lines.append("L.start()")  # what the prologue computes is there for every lane
    start = len(writer.lines)
    for block in program.blocks:
        writer.block(block)
    body = writer.lines[start:]
    writer.lines = writer.lines[:start]
    writer.lines += ["try:", *(f"    {line}" for line in body or ["pass"])]
    writer.lines += ["except BaseException:", "    L.abandon()", "    raise"]
    if writer.lane != MAIN:
        writer.lines.append(f"L.enter({MAIN!r})")
    writer.lines.append(f"L.finish([{', '.join(f's{s}' for s in sorted(program.foreign))}])")
    for step in program.epilogue:
        writer.step(step)
    results = ", ".join(
        writer.bind("k", r.value) if isinstance(r, p.Constant) else f"s{r}" for r in program.results
    )
    writer.lines.append(f"return [{results}]")
    source = "def run(a):\n" + "\n".join(f"    {line}" for line in writer.lines) + "\n"
    scope = dict(writer.names)
    exec(compile(source, f"<dynaflow {program.region.name} {program.plan.phase}>", "exec"), scope)
    return scope["run"], source
