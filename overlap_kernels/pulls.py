"""Copies out of the other ranks' memory beside what the current stream computes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dynaflow_train.overlap_kernels.pool import Space


class Pulls:
    """Parts copied one after another on a space's own stream; on the CPU at once.

    The copy engines of a GPU do them: they take no SMs from the products beside them.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._done: list[torch.cuda.Event] = []
        self._on_side: Any = contextlib.nullcontext
        if space.side is not None:
            side = space.side
            self._on_side = lambda: torch.cuda.stream(side)

    def ready(self) -> None:
        """What the current stream has done so far comes before the copies that follow."""
        if self._space.side is not None:
            self._space.side.wait_stream(torch.cuda.current_stream())

    def copy(self, parts: Sequence[tuple[Tensor, Tensor]], *, meet: bool) -> None:
        """Copy (into, from) pairs as one part; with `meet` once all ranks have come this far."""
        with self._on_side():
            if meet:
                self._space.meet()
            for into, source in parts:
                into.copy_(source, non_blocking=True)
            if self._space.side is not None:
                event = torch.cuda.Event()
                event.record()
                self._done.append(event)

    def end(self) -> None:
        """All ranks have copied: the buffers may be written again once `join` was called."""
        with self._on_side():
            self._space.meet()

    def wait(self, number: int) -> None:
        """The current stream goes on when part `number` is there."""
        if self._done:
            self._done[number].wait()

    def join(self) -> None:
        """The current stream goes on when the side stream is done."""
        if self._space.side is not None:
            torch.cuda.current_stream().wait_stream(self._space.side)


def rows_of(tensor: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """A tensor's rows in parts of nearly the same number; some may be empty."""
    return tensor.view(-1, tensor.shape[-1]).tensor_split(chunks)
