"""What the fast path adds to a launch: microseconds of host time beyond calling the op itself.

    python -m dynaflow_train.benchmarks.launches                # one process, a few seconds

Llama-like layers, forward and backward of each strategy: the emitted code runs with every op's
function replaced by one that returns what it returned before, less the time of calling these alone.
On CUDA the events of lanes are part of what is left out: they are the plan's, not the path's.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dynaflow_train as df
from dynaflow_train import api
from dynaflow_train.benchmarks.cases import Case
from dynaflow_train.benchmarks.models import build
from dynaflow_train.execute import program as p
from dynaflow_train.execute.emit import emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.execute.runner import Entry

SMALL = Case("small", hidden=64, heads=4, kv_heads=2, ffn=128, layers=4, batch=4, tokens=16)
STRATEGIES = ("sequential", "comm_overlap", "dual_batch", "nanoflow")
ROUNDS = 200


def replaced(program: p.Program, change: Callable[[Any], Any]) -> p.Program:
    """With other functions in place of the ops' and the collectives'."""
    calls = (p.Run, p.Communicate)
    blocks = tuple(
        dataclasses.replace(
            block,
            steps=[
                dataclasses.replace(s, function=change(s.function)) if isinstance(s, calls) else s
                for s in block.steps
            ],
        )
        for block in program.blocks
    )
    return dataclasses.replace(program, blocks=blocks)


def added_us(entry: Entry, arguments: list[Any]) -> tuple[float, int]:
    """Microseconds that the path adds to one launch, and the number of launches of a call."""
    returned: list[Any] = []

    def remembering(function: Any) -> Any:
        def call(*given: Any) -> Any:
            returned.append(function(*given))
            return returned[-1]

        return call

    emit(replaced(entry.program, remembering), entry.lanes)[0](list(arguments))
    stubs = [lambda *_, value=value: value for value in returned]
    left = iter(stubs)
    run, _ = emit(replaced(entry.program, lambda _: next(left)), entry.lanes)
    whole, alone = [], []
    for _ in range(ROUNDS):
        given = list(arguments)
        begin = time.perf_counter()
        run(given)
        between = time.perf_counter()
        for stub in stubs:
            stub(None)
        end = time.perf_counter()
        whole.append(between - begin)
        alone.append(end - between)
    launches = len(entry.program.blocks)
    return (statistics.median(whole) - statistics.median(alone)) * 1e6 / launches, launches


def measure(strategy: str) -> list[tuple[str, float, int]]:
    """(phase, microseconds a launch, launches) of a strategy."""
    device, mesh = torch.device("cpu"), dist.device_mesh.init_device_mesh("cpu", (1,))
    model = build(SMALL, device, torch.float32, mesh=mesh)
    df.compile(model, strategy, executor="eager")
    found: list[tuple[str, float, int]] = []
    for measured in (False, False, False, True):
        entries = [
            entry
            for session in api.sessions(model)
            for capture in session.captures
            for runner in capture.runners
            for entry in runner.entries.values()
        ]
        for entry in entries if measured else ():

            def call(arguments: list[Any], plain: Any = entry.call, entry: Entry = entry) -> Any:
                given = list(arguments)
                found.append((entry.plan.phase, *added_us(entry, given)))
                return plain(arguments)

            entry.call = call
        output = model(**SMALL.inputs(device, torch.float32)).last_hidden_state
        output.backward(torch.ones_like(output))
    return found


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for strategy in STRATEGIES:
        torch._dynamo.reset()
        for phase, added, launches in measure(strategy):
            print(f"{strategy} {phase}: {added:.2f} us a launch beyond the op, {launches} launches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
