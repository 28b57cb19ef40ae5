"""Runs a program block by block: the reference for the fast path, with room for hooks.

`before(block)` runs on the block's lane before its steps (tests delay streams there); `after(block,
work)` when it is issued (measurement).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynaflow_train.execute import program as p
from dynaflow_train.execute.program import MAIN, Block, Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.execute.lanes import Lanes

Env = list[Any]


def _nothing(*_: Any) -> None:
    pass


def interpret(
    program: Program,
    lanes: Lanes,
    arguments: list[Any],
    before: Callable[[Block], None] = _nothing,
    after: Callable[[Block, Any], None] = _nothing,
) -> list[Any]:
    """Run `program` on the arguments of one call; the list is emptied.

    Raises:
        Whatever an op raises; streams are joined first, nothing is kept.
    """
    env: Env = [None] * program.num_slots
    for index, slot in program.arguments.items():
        env[slot] = arguments[index]
    arguments.clear()
    for step in program.prologue:
        perform(step, env, lanes)
    lanes.start()  # what the prologue computes is there for every lane
    try:
        for block in program.blocks:
            _run(block, env, lanes, before, after)
    except BaseException:
        lanes.abandon()
        raise
    lanes.enter(MAIN)
    lanes.finish([env[slot] for slot in program.foreign])
    for step in program.epilogue:
        perform(step, env, lanes)
    return [r.value if isinstance(r, p.Constant) else env[r] for r in program.results]


def _run(
    block: Block,
    env: Env,
    lanes: Lanes,
    before: Callable[[Block], None],
    after: Callable[[Block, Any], None],
) -> None:
    for slot in block.drops:
        env[slot] = None
    lanes.enter(block.lane)
    for launch in (*block.own_waits, *block.waits):
        if launch in block.waits or lanes.asynchronous:
            lanes.wait(block.lane, launch)
    before(block)
    work = None
    for step in block.steps:
        work = perform(step, env, lanes) or work
    lanes.issued(block.lane, block.launch, work, awaited=block.awaited)
    after(block, work)
    for slot in block.drops_after:
        env[slot] = None


def _memory(step: p.Alias | p.Alloc | p.Lend, env: Env) -> Any:
    match step:
        case p.Alias(source=source):
            return env[source]
        case p.Alloc(meta=meta):
            return meta.empty()
        case p.Lend(tensor=tensor):
            return tensor


def perform(step: p.Step, env: Env, lanes: Lanes) -> Any:
    """One step; gives the Work of a collective."""
    match step:
        case p.Run(function, inputs, outputs):
            results = function([env[slot] for slot in inputs])
            for slot, result in zip(outputs, results, strict=True):
                env[slot] = result
        case p.Part(out=out, source=source):
            env[out] = step.apply(env[source])
        case p.Communicate(function, source, out, blocking):
            return function(env[source], env[out], lanes.asynchronous and not blocking)
        case p.SendRows(function, inputs, out):
            env[out], work = function([env[slot] for slot in inputs], lanes.asynchronous)
            return work
        case p.Sum(out, left, right, in_place):
            env[out] = env[left].add_(env[right]) if in_place else env[left] + env[right]
        case p.Alias() | p.Alloc() | p.Lend():
            env[step.out] = _memory(step, env)
        case p.Store(into, source):
            target = env[into]
            target.copy_(env[source].reshape(target.shape))
        case p.Restride(out, source, meta):
            tensor = env[source]
            env[out] = tensor if meta.fits(tensor) else meta.copy_of(tensor)
    return None
