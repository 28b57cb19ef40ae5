"""Shape, strides, dtype and device of a tensor, known before it exists."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Meta:
    """What an op is compiled for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Meta:
        """The meta of a real or static fake tensor."""
        return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these strides, where they matter."""
        found = tensor.stride()
        return found == self.stride or all(
            n < 2 or a == b for n, a, b in zip(self.shape, found, self.stride, strict=True)
        )

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor` with these strides; an expanded dimension stays expanded."""
        shape = [1 if s == 0 else n for n, s in zip(self.shape, self.stride, strict=True)]
        for dim, size in enumerate(shape):
            tensor = tensor.narrow(dim, 0, size)
        new = torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)
        return new.copy_(tensor).expand(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_expanded(self) -> bool:
        """Whether several elements share memory."""
        return any(s == 0 and n > 1 for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements stand in row-major order without gaps."""
        return self.stride == row_major(self.shape) or math.prod(self.shape) == 0


NOTHING = Meta((), (), torch.int64, torch.device("cpu"))  # stands in for what is no tensor


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor (dimensions of size one count as torch counts them)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
