"""Recorded calls: a whole phase, all its lanes and collectives, as one CUDA graph.

A recording reads and writes fixed memory. What a call hands out is that memory, so it is replayed
only when nobody holds a result of its last call any more; until then another recording runs, as
many as forwards are in flight, up to a limit, beyond which calls run launch by launch. Tensors that
stand elsewhere at every call are copied in; those that stay where they are (parameters, what the
forward's recording saved) are read in place. Equal layers share a context and not their parameters:
each place where these stand has recordings of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_RECORDINGS = 4  # of one context that are in flight at once
WARMUPS = 3  # calls before the first recording: kernels are loaded, the third is measured
UNTIL_RECORDED = WARMUPS + 2  # calls until forward and backward are recorded, if nothing moves
MOST_MOVES = 3  # as often something may turn out to move after all
MOST_PLACES = 1024  # where the parameters of one context may stand: more are no layers

Key = int | tuple[int, ...]  # a forward's ticket, or where parameters stand

Call = Callable[[list[Any]], list[Any]]


class Recorder(Protocol):
    """Makes a call repeatable."""

    def record(self, call: Call, arguments: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """The memory that holds the results of each replay, and what replays."""
        ...

    def release(self) -> None:
        """Give back the memory of recordings that are gone."""


class CudaRecorder:
    """Captures into a CUDA graph with a memory pool of its own; NCCL's collectives with it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def record(self, call: Call, arguments: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Nothing runs yet: the first replay does."""
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            # Other threads go on: the autograd engine's, NCCL's watchdog.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = call(arguments)
            finally:
                graph.capture_end()
        caller.wait_stream(self.stream)
        return results, graph.replay

    def release(self) -> None:
        """A new graph cannot use what the allocator keeps of an old one's pool."""
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Place:
    """A result that is the argument of that index."""

    index: int


@dataclass(frozen=True)
class Tickets:
    """How a forward names its recordings.

    Attributes:
        plain: what the forward saves where it is not recorded.
        new: makes another that means the same plan, in a recording of its own.
        forget: its recording is gone.
    """

    plain: Tensor
    new: Callable[[], Tensor]
    forget: Callable[[Tensor], None]


class Recording:
    """One recorded call and the memory it reads and writes.

    Attributes:
        inputs: place among the arguments -> memory that is copied into before a replay.
        addresses: place -> where a tensor must stand that is read in place.
        results: what each replay writes; arguments that are handed through are places.
        ticket: what the forward saves in place of its plain ticket.
    """

    def __init__(
        self,
        inputs: Mapping[int, Tensor],
        read: Mapping[int, Tensor],
        results: Sequence[Any],
        replay: Callable[[], None],
        ticket: Tensor | None,
    ) -> None:
        self.inputs, self.results, self.replay, self.ticket = inputs, results, replay, ticket
        self.addresses = {i: tensor.data_ptr() for i, tensor in read.items()}
        memory = [*inputs.values(), *(r for r in results if _is_memory(r) and r is not ticket)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in memory}
        for tensor in read.values():  # views of what is read in place: not ours
            storages.pop(tensor.untyped_storage()._cdata, None)
        del memory
        self._held = [(storage, _uses(storage)) for storage in storages.values()]

    @property
    def in_flight(self) -> bool:
        """Whether anybody holds memory that a replay would overwrite."""
        return any(_uses(storage) > alone for storage, alone in self._held)

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether what is read in place stands where it stood."""
        return all(arguments[i].data_ptr() == at for i, at in self.addresses.items())

    def run(self, arguments: list[Any]) -> list[Any]:
        """Replay; `arguments` is emptied."""
        for place, memory in self.inputs.items():
            memory.copy_(arguments[place])
        given = [self.inputs.get(i, a) for i, a in enumerate(arguments)]
        arguments.clear()
        self.replay()
        found: list[Any] = []
        for result in self.results:
            if isinstance(result, Place):
                value = given[result.index]
                found.append(value.detach() if result.index in self.inputs else value)
            else:  # another tensor on the same memory, whose life tells whether it is free
                own = _is_memory(result) and result is not self.ticket
                found.append(result.detach() if own else result)
        return found


@dataclass
class Recordings:
    """All recordings of one context and phase.

    Attributes:
        recorder: how calls are recorded.
        used: places of the arguments that the program reads.
        parameters: of these, a forward's parameters.
        tickets: of a forward that saves them.
        milliseconds: what recording took, all in all.
        why_not: why calls are not recorded any more, or None.
        made: by the forward's ticket in a backward, by where parameters stand in a forward.
    """

    recorder: Recorder
    used: frozenset[int]
    parameters: tuple[int, ...] = ()
    tickets: Tickets | None = None
    milliseconds: float = 0.0
    why_not: str | None = None
    made: dict[Key, list[Recording]] = field(default_factory=dict[Key, list[Recording]])
    _moving: set[int] = field(default_factory=set[int])
    _seen: dict[Key, dict[int, int]] = field(default_factory=dict[Key, dict[int, int]])
    _moves: int = 0

    def __str__(self) -> str:
        number = sum(map(len, self.made.values()))
        text = f"{number} CUDA graph{'s' * (number != 1)}, {self.milliseconds:.0f} ms to record"
        return text if self.why_not is None else f"runs launch by launch: {self.why_not}"

    def find(
        self, call: Call, calls: int, arguments: list[Any], ticket: int | None = None
    ) -> Recording | None:
        """A recording that may run now, made if there is none; None to run launch by launch.

        Args:
            call: what is recorded.
            calls: how often this context ran, this call included.
            arguments: of this call.
            ticket: of the forward whose backward this is: it says where saved tensors stand.
        """
        if self.why_not is not None:
            return None
        key = tuple(arguments[i].data_ptr() for i in self.parameters) if ticket is None else ticket
        if self._still_warming(calls, arguments, key):
            return None
        known = self.made.setdefault(key, [])
        self._drop_moved(known, arguments)
        for recording in known:
            if not recording.in_flight:
                return recording
        if self.why_not is not None or len(known) >= MOST_RECORDINGS:
            return None
        return self._record(call, arguments, known)

    def _drop_moved(self, known: list[Recording], arguments: Sequence[Any]) -> None:
        """Forget those that read where nothing stands any more, and their memory."""
        moved = [at for at, recording in enumerate(known) if not recording.fits(arguments)]
        for at in reversed(moved):  # no name keeps one alive
            self._note_moves(known[at], arguments)
            self._forget(known.pop(at))
        if moved:
            self.recorder.release()

    def _still_warming(self, calls: int, arguments: Sequence[Any], key: Key) -> bool:
        """Note where tensors stand; what stood elsewhere before is copied from then on."""
        if self.made.get(key):
            return False
        now = {
            i: a.data_ptr()
            for i, a in enumerate(arguments)
            if i in self.used and isinstance(a, Tensor)
        }
        before = self._seen.get(key)
        if before is None and isinstance(key, tuple):
            self._note_place()
        self._seen[key] = now
        if before is not None:
            self._moving |= {i for i, at in now.items() if before.get(i, at) != at}
        return self.why_not is not None or before is None or calls <= WARMUPS

    def _note_place(self) -> None:
        """Parameters stand where none stood before: another layer's, or they move."""
        self._moves += any(self.made.values())
        if self._moves > MOST_MOVES or len(self._seen) >= MOST_PLACES:
            self._stop("parameters stand elsewhere at every step (sharded ones do)")

    def _note_moves(self, recording: Recording, arguments: Sequence[Any]) -> None:
        moved = {i for i, at in recording.addresses.items() if arguments[i].data_ptr() != at}
        self._moves += not moved <= self._moving  # else another recording told of it
        self._moving |= moved
        if self._moves > MOST_MOVES:
            self._stop(f"tensors moved {self._moves} times after calls were recorded")

    def _stop(self, reason: str) -> None:
        self.why_not = reason
        self.forget()

    def _record(self, call: Call, arguments: list[Any], known: list[Recording]) -> Recording | None:
        begin = time.perf_counter()
        tensors = {i: arguments[i] for i in self.used if isinstance(arguments[i], Tensor)}
        inputs = {
            i: torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
            for i, a in tensors.items()
            if i in self._moving
        }
        given = [inputs.get(i, a) for i, a in enumerate(arguments)]
        try:
            results, replay = self.recorder.record(call, list(given))
        except RuntimeError as error:
            self._stop(f"it cannot be recorded: {str(error).splitlines()[0]}")
            return None
        places: dict[int, Any] = {
            id(a): Place(i) for i, a in enumerate(given) if isinstance(a, Tensor)
        }
        ticket = None
        if self.tickets is not None:
            ticket = self.tickets.new()
            places[id(self.tickets.plain)] = ticket
        results = [places.get(id(r), r) for r in results]
        read = {i: a for i, a in tensors.items() if i not in inputs}
        known.append(Recording(inputs, read, results, replay, ticket))
        self.milliseconds += (time.perf_counter() - begin) * 1e3
        return known[-1]

    def drop(self, ticket: int) -> None:
        """Those of one forward's backward."""
        self.made.pop(ticket, None)
        self._seen.pop(ticket, None)

    def forget(self) -> None:
        """Drop all."""
        for recordings in self.made.values():
            for recording in recordings:
                self._forget(recording)
        self.made.clear()

    def _forget(self, recording: Recording) -> None:
        if self.tickets is not None and recording.ticket is not None:
            self.tickets.forget(recording.ticket)


def _is_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _uses(storage: Any) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
