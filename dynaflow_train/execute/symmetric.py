"""Rings in symmetric memory: GPUs of one host read one another's memory by their copy engines."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from dynaflow_train.config import SYMMETRIC_MULTICAST, without_multicast
from dynaflow_train.execute.collectives import resolve
from dynaflow_train.execute.exchange import Ring

if TYPE_CHECKING:
    from dynaflow_train.config import Environment

PATIENCE_MS = 600_000  # as long as NCCL's watchdog waits for a rank
Ask = Callable[[str, str], list[str]]


@dataclass
class Rings:
    """The rings of one compiled model, made when a plan first needs them.

    Attributes:
        device: this rank's.
        environment: what forbids peers or multicast.
        ask: (group, text) -> the texts of all its ranks.
        chunks: see `Ring`.
        refuse: is told why a group's collectives stay with the process group; may raise.
        made: (group, lane) -> rings, the largest last.
        refused: group -> why, or "".
    """

    device: torch.device
    environment: Environment
    ask: Ask
    chunks: int
    refuse: Callable[[str], None]
    made: dict[tuple[str, str], list[Ring]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def connect(self, group: str, lane: str, depth: int, size: int) -> Ring | None:
        """A ring of at least `depth` buffers of `size` bytes; None if the group cannot have one.

        Called for the same plans in the same order on all ranks: they meet in it.
        """
        if group not in self.refused:
            self.refused[group] = self.why_not(group)
            if self.refused[group]:
                self.refuse(f"collectives of group {group} are not copied: {self.refused[group]}")
        if self.refused[group]:
            return None
        rings = self.made.setdefault((group, lane), [])
        for ring in rings:
            if ring.buffers[0].shape[0] >= depth and ring.buffers[0].shape[1] >= size:
                return ring
        rings.append(_ring(group, self.device, (depth, size), self.chunks))
        return rings[-1]

    def told(self) -> list[str]:
        """Of each group, what it has or why it has nothing."""
        lines = [
            f"group {g}: not by the copy engine: {why}" for g, why in self.refused.items() if why
        ]
        for (group, lane), rings in self.made.items():
            mib = sum(ring.buffers[ring.rank].nbytes for ring in rings) / 2**20
            lines.append(
                f"group {group}, stream {lane}: by the copy engine, {mib:.0f} MiB of buffers"
            )
        return lines

    def why_not(self, group: str) -> str:
        """Why its ranks cannot read one another's memory, or ""; the same answer on all ranks."""
        own = {"host": socket.gethostname(), "device": self.device.index, "why": self._alone()}
        heard: list[dict[str, Any]] = [json.loads(t) for t in self.ask(group, json.dumps(own))]
        for rank, each in enumerate(heard):
            if each["why"]:
                return f"rank {rank}: {each['why']}"
        if len({each["host"] for each in heard}) > 1:
            return f"its ranks are on several hosts ({', '.join(e['host'] for e in heard)})"
        unseen = [e["device"] for e in heard if not self._reaches(e["device"])]
        refusals = self.ask(group, json.dumps(unseen))
        for rank, text in enumerate(refusals):
            if peers := json.loads(text):
                return f"rank {rank} has no P2P access to cuda:{peers[0]} (`dynaflow doctor`)"
        return ""

    def _alone(self) -> str:
        if self.device.type != "cuda":
            return f"the copy engine needs CUDA, the model is on {self.device}"
        if self.environment.p2p_off:
            return "NCCL_P2P_DISABLE=1 says that GPUs are not to reach one another"
        if self.environment.variables.get(SYMMETRIC_MULTICAST, "1") != "1":
            return f"{SYMMETRIC_MULTICAST} allows multicast, which is never used; unset it"
        return ""

    def _reaches(self, peer: int) -> bool:
        if peer == self.device.index or peer >= torch.cuda.device_count():
            return True  # not visible under this number: the rendezvous finds out
        return torch.cuda.can_device_access_peer(self.device.index, peer)


def _ring(group: str, device: torch.device, shape: tuple[int, int], chunks: int) -> Ring:
    """Allocates, and meets the other ranks, which do the same."""
    without_multicast()
    own = symmetric_memory.empty(shape, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, resolve(group))
    buffers = tuple(
        own if rank == handle.rank else handle.get_buffer(rank, shape, torch.uint8)
        for rank in range(handle.world_size)
    )

    def meet() -> None:
        handle.barrier(channel=0, timeout_ms=PATIENCE_MS)

    return Ring(handle.rank, buffers, meet, chunks, torch.cuda.Event)
