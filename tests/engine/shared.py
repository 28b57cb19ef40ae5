"""Rings in memory that processes of one machine really share: what symmetric memory is on GPUs."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from dynaflow_train.execute.exchange import Ring


class CountingRing(Ring):
    """Notes what it is asked for."""

    def collective(self, kind, number, meta, *, last):
        self.asked[kind] += 1
        return super().collective(kind, number, meta, last=last)

    def in_chunks(self, number, meta, *, add, last):
        self.asked["in chunks"] += 1
        return super().in_chunks(number, meta, add=add, last=last)


class SharedRings:
    """Gives rings over files that all ranks map.

    Attributes:
        made: the rings, in order.
        late_s: this rank sleeps as long before each meeting.
        meetings: how often it met the others.
        asked: the kinds of exchanges of all programs, and how many.
    """

    def __init__(self, late_s: float = 0.0, chunks: int = 1) -> None:
        self.made: list[Ring] = []
        self.chunks = chunks
        self.late_s, self.meetings, self.asked = late_s, 0, Counter()

    def connect(self, group: str, lane: str, depth: int, size: int) -> Ring:
        """As `Rings.connect`, without looking for one that is there already."""
        rank, world = dist.get_rank(), dist.get_world_size()
        folder = [tempfile.mkdtemp()] if rank == 0 else [None]
        dist.broadcast_object_list(folder)
        paths = [Path(folder[0]) / f"{each}" for each in range(world)]
        self._map(paths[rank], depth, size).fill_(255)  # what is read too early is NaN
        dist.barrier()
        buffers = tuple(self._map(path, depth, size) for path in paths)
        dist.barrier()
        ring = CountingRing(rank, buffers, self.meet, self.chunks)
        object.__setattr__(ring, "asked", self.asked)
        self.made.append(ring)
        return self.made[-1]

    def meet(self) -> None:
        """A real barrier: gloo's."""
        time.sleep(self.late_s)
        self.meetings += 1
        dist.barrier()

    def _map(self, path: Path, depth: int, size: int) -> torch.Tensor:
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=depth * size)
        return torch.empty(0, dtype=torch.uint8).set_(storage).view(depth, size)
