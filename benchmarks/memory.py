"""Peak device memory, graph pools included."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dynaflow_train.benchmarks.steps import PlainStep

MIB = 2**20


def held_mib(device: torch.device) -> float | None:
    """What tensors hold once everything unused is given back; None on the CPU."""
    gc.collect()
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / MIB


def graph_mib(device: torch.device) -> float | None:
    """Of it, in pools of CUDA graphs."""
    if device.type != "cuda":
        return None
    segments = torch.cuda.memory_snapshot()
    private = (
        s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)
    )
    return sum(private) / MIB


def peak_mib(step: PlainStep, device: torch.device, before: float | None) -> dict[str, Any]:
    """Peak memory of steps begun without gradients, beyond what tensors held `before`.

    `peak_mib` is what tensors hold, exact. `reserved_mib` is what the allocator takes from the
    device: an upper bound, which counts what lies free between other variants' tensors and cannot
    be given back. What an empty cache moves is recorded anew, once: some steps go before those that
    count.
    """
    if device.type != "cuda" or before is None:
        return {"peak_mib": None, "reserved_mib": None}
    for _ in range(2):
        step.forget()
        held_mib(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            step()
    held, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_mib": held / MIB - before, "reserved_mib": reserved / MIB - before}
