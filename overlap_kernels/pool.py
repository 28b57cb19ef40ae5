"""Memory that the ranks of one host share, with flags by which they wait for one another.

All of it comes from one pool. It is allocated when a kernel is bound, which all ranks do in one
order, never during capture, and goes with the pool.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from dynaflow_train.config import without_multicast
from dynaflow_train.errors import KernelError

Ask = Callable[[str, str], list[str]]
SLOTS = 256  # flags a rank has on each rank: one a CTA, the last for `meet`
ALIGNED = 512
PATIENCE_S = 600.0  # as long as NCCL's watchdog waits for a rank
SPINS_PER_S = {"cuda": 1_000_000, "cpu": 20_000}  # about, of a flag in the own memory


@functools.cache
def triton_kernels() -> Any:
    """The module of Triton kernels, or None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dynaflow_train.overlap_kernels.dense_triton")


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device: on a GPU, or interpreted."""
    kernels = triton_kernels()
    if kernels is None:
        return False
    return device.type == "cuda" or type(kernels.meet).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class Space:
    """A part of the pool, as one rank sees it. One stream at a time may use it.

    Attributes:
        kernel: whose it is. group: the process group. rank: this one in the group.
        buffers: by rank, bytes; flags: by rank, int32 [world, SLOTS].
        tables: addresses of the buffers, and of the flags: int64 [2, world] on the device.
        epochs: meetings of each slot so far, int32 [SLOTS] on the device.
        state: whether somebody gave up waiting, int32 [1] on the device; `host` the same where the
            host sees it: 1 + the rank that did not come.
        limit: spins before giving up.
        side: a stream for copies out of the others' memory; None on the CPU.
    """

    kernel: str
    group: str
    rank: int
    buffers: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    tables: Tensor
    epochs: Tensor
    state: Tensor
    host: Tensor
    limit: int
    side: torch.cuda.Stream | None

    @property
    def world(self) -> int:
        """How many ranks share it."""
        return len(self.buffers)

    @property
    def others(self) -> tuple[int, ...]:
        """The next rank first, so that not all read from one."""
        return tuple((self.rank + k) % self.world for k in range(1, self.world))

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The start of a rank's buffer as a tensor.

        Raises:
            KernelError: it is larger than the buffer.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > self.buffers[rank].numel():
            raise KernelError(
                f"kernel {self.kernel!r} needs {nbytes} bytes for {list(shape)} {dtype}, its "
                f"buffer has {self.buffers[rank].numel()}. Take a larger one from the pool."
            )
        return self.buffers[rank][:nbytes].view(dtype).view(shape)

    def signals(self) -> tuple[Any, ...]:
        """What every Triton kernel takes to wait: flags, epochs, state, host, limit."""
        return self.tables[1], self.epochs, self.state, self.host, self.limit

    def meet(self) -> None:
        """All ranks, in the current stream: each sees what the others wrote before."""
        if runs_triton(self.state.device):
            meet = triton_kernels().meet
            options = {"WORLD": self.world, "SLOTS": SLOTS, "num_warps": 1}
            meet[(1,)](*self.signals(), self.rank, SLOTS - 1, **options)
        else:
            self._meet_on_host()

    def _meet_on_host(self) -> None:
        """The same between processes of one CPU."""
        epoch = int(self.epochs[SLOTS - 1]) + 1
        self.epochs[SLOTS - 1] = epoch
        for flags in self.flags:
            flags[self.rank, SLOTS - 1] = epoch
        for peer in range(self.world):
            end = time.monotonic() + self.limit / SPINS_PER_S["cpu"]
            while int(self.flags[self.rank][peer, SLOTS - 1]) < epoch and not int(self.state):
                if time.monotonic() >= end:
                    self.state.fill_(1)
                    self.host.fill_(peer + 1)
                time.sleep(0)

    def check(self) -> None:
        """Fail if a rank did not come; on CUDA after the kernel that waited has ended.

        Raises:
            KernelError: names the rank and the kernel.
        """
        if missing := int(self.host):
            seconds = self.limit / SPINS_PER_S[self.state.device.type]
            raise KernelError(
                f"kernel {self.kernel!r}: rank {missing - 1} of group {self.group} did not come "
                f"within about {seconds:.3g} s, says rank {self.rank}. It died, hangs, or runs "
                f"another plan; results since then are wrong. Look at its log and start again."
            )


@dataclass
class Pool:
    """All memory of one compiled model's kernels.

    Attributes:
        device: this rank's.
        ask: (group, text) -> the texts of all its ranks, in their order.
        patience_s: how long a kernel waits for a rank.
        spaces: by kernel, group and stream, the largest last.
    """

    device: torch.device
    ask: Ask
    patience_s: float = PATIENCE_S
    spaces: dict[tuple[str, str, str], list[Space]] = field(default_factory=dict)

    def take(self, kernel: str, group: str, lane: str, nbytes: int) -> Space:
        """Memory of at least `nbytes` for one kernel on one stream; all ranks take it in turn.

        Raises:
            KernelError: a CUDA graph is being captured.
        """
        found = self.spaces.setdefault((kernel, group, lane), [])
        for space in found:
            if space.buffers[0].numel() >= nbytes:
                return space
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"kernel {kernel!r} needs {nbytes} bytes of shared memory during capture. Run it "
                f"once with these sizes before."
            )
        nbytes = -(-nbytes // ALIGNED) * ALIGNED
        found.append(self._allocate(kernel, group, nbytes))
        return found[-1]

    def check(self) -> None:
        """`Space.check` of all.

        Raises:
            KernelError: a rank did not come.
        """
        for spaces in self.spaces.values():
            for space in spaces:
                space.check()

    def close(self) -> None:
        """Let all memory go; what was bound to it must not run again."""
        self.spaces.clear()

    def told(self) -> list[str]:
        """Of each kernel, what it holds."""
        return [
            f"kernel {kernel}, group {group}, stream {lane}: "
            f"{sum(s.buffers[0].nbytes for s in spaces) / 2**20:.1f} MiB of shared buffers"
            for (kernel, group, lane), spaces in self.spaces.items()
        ]

    def _allocate(self, kernel: str, group: str, nbytes: int) -> Space:
        ranks = dist.distributed_c10d._resolve_process_group(cast("Any", group))
        world, on_gpu = ranks.size(), self.device.type == "cuda"
        size = nbytes + world * SLOTS * 4
        memory = _symmetric(group, size, self.device) if on_gpu else _files(group, size, self.ask)
        buffers = tuple(each[:nbytes] for each in memory)
        flags = tuple(each[nbytes:].view(torch.int32).view(world, SLOTS) for each in memory)
        flags[ranks.rank()].zero_()
        tables = [[each.data_ptr() for each in tensors] for tensors in (buffers, flags)]
        made = Space(
            kernel, group, ranks.rank(), buffers, flags,
            torch.tensor(tables, dtype=torch.int64, device=self.device),
            torch.zeros(SLOTS, dtype=torch.int32, device=self.device),
            torch.zeros(1, dtype=torch.int32, device=self.device),
            torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu),
            max(1, min(2**31 - 1, int(self.patience_s * SPINS_PER_S[self.device.type]))),
            torch.cuda.Stream(self.device, priority=-1) if on_gpu else None,
        )  # fmt: skip
        if on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        self.ask(group, "ready")  # nobody signals before all flags are zero
        return made


def _symmetric(group: str, size: int, device: torch.device) -> tuple[Tensor, ...]:
    without_multicast()
    own = symmetric_memory.empty((size,), dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, cast("Any", group))
    return tuple(
        own if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8)
        for rank in range(handle.world_size)
    )


def _files(group: str, size: int, ask: Ask) -> tuple[Tensor, ...]:
    """For rehearsal on the CPU: memory of all ranks, mapped by each."""
    number, path = tempfile.mkstemp(prefix="dynaflow-")
    os.ftruncate(number, size)
    os.close(number)
    memory = tuple(
        torch.from_file(each, shared=True, size=size, dtype=torch.uint8)
        for each in ask(group, path)
    )
    ask(group, "mapped")
    os.unlink(path)
    return memory
