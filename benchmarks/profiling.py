"""What the profiler saw: hidden communication, copies, and what a run without P2P must not hold.

Works on the events of a trace in Chrome's format, which torch.profiler exports: public, and
the same for kernels launched one by one and for those of a CUDA graph.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from dynaflow_train.report import gaps, union

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynaflow_train.benchmarks.steps import Clock

Event = dict[str, Any]
REPEATS = 2  # steps in a trace

_DEVICE = ("kernel", "gpu_memcpy")
_SYMMETRIC = r"symm|one_shot|two_shot|multimem|nvshmem|barrier_kernel|(put|wait|send)_signal"
_COMMUNICATION = re.compile(rf"nccl|rccl|Memcpy PtoP|{_SYMMETRIC}", re.IGNORECASE)
_PEER = re.compile(rf"Memcpy PtoP|{_SYMMETRIC}", re.IGNORECASE)
_ATEN = ("aten::copy_", "aten::cat")
_MOVES = (
    "clone|copy|cat|stack|view|reshape|transpose|permute|slice|select|split|expand|unsqueeze"
    "|squeeze|unsafe|t"
)
_TRITON = re.compile(rf"triton_\w+?_fused_(?=\w*(?:clone|copy|cat|stack))(?:_*(?:{_MOVES})_+)+\d+$")
_COPY_KERNEL = re.compile(r"direct_copy_kernel|CatArrayBatchedCopy|Memcpy DtoD", re.IGNORECASE)
_BYTES = {
    "float": 4, "int": 4, "double": 8, "long": 8, "long int": 8, "bool": 1, "signed char": 1,
    "unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "short": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Communication:
    """Milliseconds of communication kernels, and of these beside others on another stream."""

    ms: float
    hidden_ms: float


@dataclass(frozen=True)
class Copies:
    """Copies: their number, and bytes written; None where one of them does not say how many."""

    count: float
    size: float | None


def record(step: Callable[[], object], clock: Clock) -> list[Event]:
    """The events of `REPEATS` steps of this rank."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.is_cuda else [])]
    clock.finish()
    with profile(activities=kinds, record_shapes=True, acc_events=True) as found:
        for _ in range(REPEATS):
            step()
        clock.finish()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [each for each in events if each.get("ph") == "X"]


def communication(events: Sequence[Event]) -> Communication:
    """Intervals of communication kernels, intersected with those of all others, per step."""
    spans: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    ours: list[tuple[Any, tuple[float, float]]] = []
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        stream, span = event["args"].get("stream"), (event["ts"], event["ts"] + event["dur"])
        if is_communication(event["name"]):
            ours.append((stream, span))
        else:
            spans[stream].append(span)
    busy = {
        stream: union(s for other, found in spans.items() if other != stream for s in found)
        for stream in {stream for stream, _ in ours}
    }
    whole = sum(end - start for _, (start, end) in ours)
    exposed = sum(end - start for s, span in ours for start, end in gaps(span, busy[s]))
    return Communication(whole / 1e3 / REPEATS, (whole - exposed) / 1e3 / REPEATS)


def is_communication(name: str) -> bool:
    """Whether a kernel or copy moves data between devices."""
    return _COMMUNICATION.search(name) is not None


def only_copies(name: str) -> bool:
    """Whether the name of an Inductor kernel says that it does nothing but move."""
    return _TRITON.match(name) is not None


def peers(events: Sequence[Event]) -> list[str]:
    """Names of peer copies and symmetric-memory kernels."""
    names = {each["name"] for each in events if each.get("cat") in _DEVICE}
    return sorted(name for name in names if _PEER.search(name))


def copies(events: Sequence[Event], item_bytes: int) -> Copies:
    """Copies within the device, per step.

    Counted are, on CUDA, kernels and copies that only move; on the CPU, the operators copy_ and cat
    (clone and contiguous call the first).

    Args:
        events: of a trace with shapes.
        item_bytes: of an element whose type the trace does not say.
    """
    operators = {
        each["args"].get("External id"): each for each in events if each.get("cat") == "cpu_op"
    }
    if any(each.get("cat") in _DEVICE for each in events):
        device = [each for each in events if each.get("cat") in _DEVICE]
        sizes = [
            each["args"].get("bytes")
            if "bytes" in each["args"]
            else _written(operators.get(each["args"].get("External id")), item_bytes)
            for each in device
            if _COPY_KERNEL.search(each["name"]) or only_copies(each["name"])
        ]
    else:
        sizes = [_written(e, item_bytes) for e in operators.values() if e["name"] in _ATEN]
    known = [size for size in sizes if size is not None]
    total = sum(known) / REPEATS if len(known) == len(sizes) else None
    return Copies(len(sizes) / REPEATS, total)


def _written(operator: Event | None, item_bytes: int) -> int | None:
    """Bytes that an operator which copies writes, if its trace tells."""
    if operator is None:
        return None
    name, dims = operator["name"], operator["args"].get("Input Dims")
    if not dims or not (name in _ATEN or only_copies(name)):
        return None
    kinds = operator["args"].get("Input type", [])
    if name == "aten::cat":
        return sum(math.prod(each) for each in dims[0]) * item_bytes
    tensors = [place for place, each in enumerate(dims) if each]
    if not tensors:
        return _BYTES.get(kinds[0], item_bytes) if kinds else item_bytes
    place = 0 if name == "aten::copy_" else tensors[-1]  # Inductor's kernels take outputs last
    kind = kinds[place] if place < len(kinds) else ""
    return math.prod(dims[place]) * _BYTES.get(kind, item_bytes)
