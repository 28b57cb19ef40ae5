"""Counts the collectives that are issued.

torch's `CommDebugMode` also follows the modules by their names, and fails (torch 2.13) where a
model makes modules call each other as transformers 5.25 does.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

OTHERS = ("wait_tensor",)  # of the namespace


class CountCollectives(TorchDispatchMode):
    """Counts functional collectives, forward and backward, while it is entered.

    Attributes:
        counts: name of the collective -> how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("_c10d_functional", "c10d") and name not in OTHERS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
