"""Late collectives change nothing; with any one wait for a collective taken out they do."""

from __future__ import annotations

import dataclasses
import functools
import time

import pytest
import torch

from dynaflow_train.api import sessions
from dynaflow_train.execute.interpret import interpret
from tests.engine.harness import Oracle, batch, compiled
from tests.engine.parallel import PARALLEL
from tests.engine.stepping import step
from tests.ranks import run_ranks

LATE_S = 0.03
SIZE = 4


def late(block):
    """A rank that comes late to every collective: the others' results are not there yet."""
    if block.is_collective:
        time.sleep(LATE_S)


def without(program, index, wait):
    """The program with one wait of one block left out."""
    block = program.blocks[index]
    less = dataclasses.replace(
        block,
        waits=tuple(w for w in block.waits if w != wait),
        own_waits=tuple(w for w in block.own_waits if w != wait),
    )
    blocks = (*program.blocks[:index], less, *program.blocks[index + 1 :])
    return dataclasses.replace(program, blocks=blocks)


def waits_for_collectives(program):
    """(block, launch waited for), for every wait for a collective.

    Not those that the CPU's one thread has waited for already, on behalf of another lane.
    """
    found, over = [], {}
    for index, block in enumerate(program.blocks):
        for wait in dict.fromkeys((*block.own_waits, *block.waits)):
            lane = program.blocks[wait].lane
            if program.blocks[wait].is_collective and wait > over.get(lane, -1):
                found.append((index, wait))
                over[lane] = wait
    return found


def delay_and_drop(rank, name, strategy):
    """How many waits there are, and those of rank 0 that may be left out without an error."""
    case = PARALLEL[name]
    oracle, inputs = Oracle(case, SIZE, torch.float32), batch(case, SIZE)
    model = compiled(case, strategy)
    for _ in range(2):
        oracle.check(step(model, inputs))
    (capture,) = sessions(model)[0].captures
    entries = [e for runner in capture.runners for e in runner.entries.values()]
    before = late if rank == 1 else lambda block: None
    for entry in entries:
        entry.calls = 10  # past the call that is measured
        entry.call = functools.partial(interpret, entry.program, entry.lanes, before=before)
    oracle.check(step(model, inputs), "delayed")
    number, useless = 0, []
    for entry in entries:
        found = waits_for_collectives(entry.program)
        for index, wait in found[:: max(1, len(found) // 4)]:
            program = without(entry.program, index, wait) if rank == 0 else entry.program
            entry.call = functools.partial(interpret, program, entry.lanes, before=before)
            result, number = step(model, inputs), number + 1
            try:
                oracle.check(result)
                useless.append((entry.plan.phase, entry.plan.launches[index].ops, wait))
            except AssertionError:
                pass
        entry.call = functools.partial(interpret, entry.program, entry.lanes, before=before)
    oracle.check(step(model, inputs), "all waits back")
    return number, useless


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["comm_overlap", "dual_batch"])
@pytest.mark.parametrize("name", ["fg", "sp"])
def test_a_missing_wait_is_wrong_where_collectives_are_late(name, strategy):
    (number, useless), (also, _) = run_ranks(delay_and_drop, 2, name, strategy)
    assert number == also
    assert number >= 6
    assert useless == []
