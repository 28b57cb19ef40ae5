"""The lanes of a plan: CUDA streams, or on the CPU the collectives under way.

Both know the same few verbs, so that one program runs on either. On the CPU compute is synchronous
and only collectives (gloo's own threads) overlap with it; a lane there is the list of its
collectives that nobody has waited for. A missing wait reads a tensor that is still being reduced,
on the CPU as on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.execute.program import MAIN, Block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HIGH, NORMAL = -1, 0
PRIORITIES = {"comm": HIGH}  # unless the recipe says otherwise; others are normal


class CpuLanes:
    """Collectives under way, by lane."""

    asynchronous = True  # a collective is asked for a Work to wait for

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.lane_of = [block.lane for block in blocks]
        self.under_way: dict[str, list[tuple[int, Any]]] = {}

    def start(self) -> None:
        """Nothing is under way."""
        self.under_way = {}

    def enter(self, lane: str) -> None:
        """All lanes are the caller's thread."""

    def wait(self, lane: str, launch: int) -> None:
        """Wait for all collectives up to `launch` on its lane, which is what a stream would do."""
        works = self.under_way.get(self.lane_of[launch], [])
        while works and works[0][0] <= launch:
            works.pop(0)[1].wait()

    def issued(self, lane: str, launch: int, work: Any, *, awaited: bool) -> None:
        """Note a collective."""
        if work is not None:
            self.under_way.setdefault(lane, []).append((launch, work))

    def finish(self, results: Sequence[torch.Tensor]) -> None:
        """Wait for all that is under way."""
        for works in self.under_way.values():
            for _, work in works:
                work.wait()
        self.under_way = {}

    def abandon(self) -> None:
        """After an error: the tensors of what is under way live until it ends."""
        self.under_way = {}


class CudaLanes:
    """One stream a lane; "compute" is the caller's stream. Events are made once."""

    asynchronous = False

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        streams: dict[str, torch.cuda.Stream],
        priorities: Mapping[str, int],
    ) -> None:
        self.device, self.streams = device, streams
        self.names = tuple(dict.fromkeys(b.lane for b in blocks if b.lane != MAIN))
        for name in self.names:
            if name not in streams:
                priority = {**PRIORITIES, **priorities}.get(name, NORMAL)
                streams[name] = torch.cuda.Stream(device, priority=priority)
        self.events = {b.launch: torch.cuda.Event() for b in blocks if b.awaited}
        self.begun = torch.cuda.Event()
        self.ended = {name: torch.cuda.Event() for name in self.names}
        self.now: dict[str, torch.cuda.Stream] = {}

    def start(self) -> None:
        """Every lane begins after what the caller has issued."""
        main = torch.cuda.current_stream(self.device)
        self.now = {MAIN: main, **{name: self.streams[name] for name in self.names}}
        if self.names:
            self.begun.record(main)
            for name in self.names:
                self.streams[name].wait_event(self.begun)

    def enter(self, lane: str) -> None:
        """Make the lane's stream current."""
        torch.cuda.set_stream(self.now[lane])

    def wait(self, lane: str, launch: int) -> None:
        """The lane's stream waits for a launch on another."""
        self.now[lane].wait_event(self.events[launch])

    def issued(self, lane: str, launch: int, work: Any, *, awaited: bool) -> None:
        """Record the launch's event where another lane waits for it."""
        if awaited:
            self.events[launch].record(self.now[lane])

    def finish(self, results: Sequence[torch.Tensor]) -> None:
        """The caller's stream waits for all lanes; results born on others are told of it."""
        main = self.now[MAIN]
        for name in self.names:
            self.ended[name].record(self.now[name])
            main.wait_event(self.ended[name])
        torch.cuda.set_stream(main)
        for tensor in results:
            tensor.record_stream(main)

    def abandon(self) -> None:
        """After an error: back to the caller's stream, which waits for what was issued."""
        self.finish(())


Lanes = CpuLanes | CudaLanes


def lanes_for(
    blocks: Sequence[Block],
    device: torch.device,
    streams: dict[str, torch.cuda.Stream],
    priorities: Mapping[str, int],
) -> Lanes:
    """Lanes of the program's device. `streams` is shared by all programs of one runner.

    A collective is a kernel of its lane's stream, so `priorities` are those of collectives too.
    """
    if device.type == "cuda":
        return CudaLanes(blocks, device, streams, priorities)
    return CpuLanes(blocks)
