"""When each launch of a program ran: events on CUDA, clocks on the CPU."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.execute.interpret import interpret
from dynaflow_train.execute.lanes import CudaLanes, Lanes
from dynaflow_train.ir import Interval

if TYPE_CHECKING:
    from dynaflow_train.execute.program import Block, Program


def measure(
    program: Program, lanes: Lanes, arguments: list[Any]
) -> tuple[list[Any], tuple[Interval, ...]]:
    """Run `program` once with the interpreter; its results, and one `Interval` a launch.

    On the CPU a collective begins when it is issued and ends when its last byte has arrived, by a
    callback of its Work. On CUDA the device is synchronised at the end.
    """
    clock = _CudaClock(lanes) if isinstance(lanes, CudaLanes) else _CpuClock()
    results = interpret(program, lanes, arguments, clock.before, clock.after)
    return results, clock.intervals()


class _CpuClock:
    def __init__(self) -> None:
        self.zero = time.perf_counter()
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.works: list[Any] = []

    def now(self) -> float:
        return (time.perf_counter() - self.zero) * 1e3

    def before(self, block: Block) -> None:
        self.starts[block.launch] = self.now()

    def after(self, block: Block, work: Any) -> None:
        if work is None:
            self.ends[block.launch] = self.now()
            return
        self.works.append(work)
        launch = block.launch

        def ended(_: Any = None) -> None:
            self.ends.setdefault(launch, self.now())

        try:
            work.get_future().add_done_callback(ended)
        except RuntimeError:  # gloo's reduce-scatter has no future: somebody has to wait for it
            threading.Thread(target=lambda: (work.wait(), ended()), daemon=True).start()

    def intervals(self) -> tuple[Interval, ...]:
        for work in self.works:
            work.wait()
        deadline = time.perf_counter() + 1.0  # callbacks run on gloo's thread, right after the wait
        while len(self.ends) < len(self.starts) and time.perf_counter() < deadline:
            time.sleep(1e-4)
        return tuple(
            Interval(launch, start, self.ends.get(launch, self.now()))
            for launch, start in self.starts.items()
        )


class _CudaClock:
    def __init__(self, lanes: CudaLanes) -> None:
        self.lanes = lanes
        self.zero = torch.cuda.Event(enable_timing=True)
        self.zero.record()
        self.starts: dict[int, torch.cuda.Event] = {}
        self.ends: dict[int, torch.cuda.Event] = {}

    def _stamp(self, block: Block) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.lanes.now[block.lane])
        return event

    def before(self, block: Block) -> None:
        self.starts[block.launch] = self._stamp(block)

    def after(self, block: Block, work: Any) -> None:
        self.ends[block.launch] = self._stamp(block)

    def intervals(self) -> tuple[Interval, ...]:
        for event in self.ends.values():
            event.synchronize()
        return tuple(
            Interval(k, self.zero.elapsed_time(s), self.zero.elapsed_time(self.ends[k]))
            for k, s in self.starts.items()
        )
