"""One training step of a model, stamped where its forward begins, where it ends, and at the end."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dynaflow_train.benchmarks.data import Averages
    from dynaflow_train.benchmarks.figures import Phases

Stamps = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Clock:
    """Events on CUDA, so that the host is never stopped inside a round; the clock on the CPU."""

    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device that runs behind the host."""
        return self.device.type == "cuda"

    def stamp(self) -> Any:
        """Now, on the current stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def phases(self, stamps: Stamps) -> Phases:
        """(forward ms, backward ms); waits for the step."""
        a, b, c = stamps
        if not self.is_cuda:
            return (b - a) * 1e3, (c - b) * 1e3
        c.synchronize()
        return a.elapsed_time(b), b.elapsed_time(c)

    def finish(self) -> None:
        """Wait until the device has done everything."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, eq=False)
class Batch:
    """What every step of a case reads: inputs and the gradient of the output, random.

    Attributes:
        data: what averages gradients over copies of the model, if there are.
    """

    inputs: dict[str, Any]
    gradient: Tensor
    data: Averages | None = None

    def backward(self, output: Tensor) -> None:
        """The backward, until all gradients are there."""
        output.backward(self.gradient)
        if self.data is not None:
            self.data.finish()


class PlainStep:
    """Calls the model and its backward.

    Attributes:
        model: what runs; `parameters` are listed once, walking the modules costs time.
        recorded_ms: what recording a graph took, or None.
    """

    def __init__(self, model: nn.Module, batch: Batch, clock: Clock) -> None:
        self.model, self.batch, self.clock = model, batch, clock
        self.parameters = list(model.parameters())
        self.recorded_ms: float | None = None

    def __call__(self) -> Stamps:
        """Issue one step; does not wait for the device."""
        self.forget()
        begin = self.clock.stamp()
        output = self.model(**self.batch.inputs).last_hidden_state
        middle = self.clock.stamp()
        self.batch.backward(output)
        return begin, middle, self.clock.stamp()

    def forget(self) -> None:
        """Drop all gradients, as optimizers do."""
        for tensor in (*self.parameters, *self.batch.inputs.values()):
            tensor.grad = None

    def gradients(self) -> list[Tensor]:
        """Of one step: the inputs' and the parameters', local shards."""
        self()
        found = [t.grad for t in (*self.batch.inputs.values(), *self.parameters)]
        return [getattr(g, "_local_tensor", g) for g in found if g is not None]


@dataclass
class _Recorded:
    graph: Any
    middle: Any
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])


class GraphStep(PlainStep):
    """The same, captured whole in one CUDA graph at the first call and replayed from then on."""

    _recorded: _Recorded | None = None

    def __call__(self) -> Stamps:
        """Replay; the end of the forward is an event recorded inside the graph."""
        recorded = self._recorded = self._recorded or self._record()
        self.forget()
        begin = self.clock.stamp()
        recorded.graph.replay()
        end = self.clock.stamp()
        for tensor, gradient in recorded.gradients:
            tensor.grad = gradient
        return begin, recorded.middle, end

    def _record(self) -> _Recorded:
        stream, caller = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(3):
                super().__call__()
        caller.wait_stream(stream)
        self.forget()
        gc.collect()
        self.clock.finish()
        start = time.perf_counter()
        middle = torch.cuda.Event(enable_timing=True, external=True)
        recorded = _Recorded(torch.cuda.CUDAGraph(), middle)
        # Other threads go on: the autograd engine's, NCCL's watchdog.
        with torch.cuda.graph(recorded.graph, stream=stream, capture_error_mode="thread_local"):
            output = self.model(**self.batch.inputs).last_hidden_state
            middle.record()
            self.batch.backward(output)
        tensors = (*self.parameters, *self.batch.inputs.values())
        recorded.gradients = [(t, t.grad) for t in tensors if t.grad is not None]
        self.recorded_ms = (time.perf_counter() - start) * 1e3
        return recorded
