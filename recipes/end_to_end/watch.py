"""Notes what a training did: when each step ended, its loss, what memory it left."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from pathlib import Path


class Watch(TrainerCallback):
    """Writes `rank<n>.json` into a folder when training ends.

    Args:
        folder: where to.
        tokens_per_step: of the whole group; its ranks share each sample.
        every: steps between two looks at the memory; the last step is always looked at.
    """

    def __init__(self, folder: Path, tokens_per_step: int, every: int) -> None:
        self.folder, self.every = folder, every
        self.found: dict[str, Any] = {
            "tokens_per_step": tokens_per_step, "began": 0.0, "ended": [], "memory": [],
        }  # fmt: skip

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is built; nothing has run."""
        self.found["began"] = time.monotonic()  # one clock for all processes of a host

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The host was stopped for this step's loss already: the Trainer looks for nan."""
        self.found["ended"].append(time.monotonic())
        step = state.global_step
        if torch.cuda.is_available() and (step % self.every == 0 or step == state.max_steps):
            look = {
                "step": step,
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "most_reserved": torch.cuda.max_memory_reserved(),
            }
            self.found["memory"].append(look)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it; each rank its own."""
        steps = [entry for entry in state.log_history if "loss" in entry]
        shares = [entry.get("hidden_share") for entry in steps]
        self.found["losses"] = [entry["loss"] for entry in steps]
        self.found["hidden_share"] = next((s for s in reversed(shares) if s is not None), None)
        self.found |= machine()
        path = self.folder / f"rank{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(self.found), encoding="utf-8")


def machine() -> dict[str, Any]:
    """Device and versions."""
    cuda = torch.cuda.is_available()
    names = ("torch", "transformers", "accelerate")
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in names},
    }
