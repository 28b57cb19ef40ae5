"""A case as ranks hand it over, small enough to work out by hand."""

from __future__ import annotations

from typing import Any


def variant(kind: str, *ranks: list[tuple[float, float]], **facts: Any) -> dict[str, Any]:
    plain = {
        "first_step_s": 1.0, "ready_s": 2.0, "recorded_ms": None, "cpu_ms": 3.0, "peak_mib": 100.0,
        "reserved_mib": 120.0,
        "graph_mib": 0.0, "copies": 0.0, "copied_bytes": 0.0, "communication_ms": 4.0,
        "hidden_ms": 1.0, "gradient_error": 0.0, "says": "",
    }  # fmt: skip
    return {"kind": kind, "times": list(ranks), **plain, **facts}


def result(link: str = "no-p2p") -> dict[str, Any]:
    """Two ranks, five rounds. Base: compile, 30 + 42; limit 17 + 25; ours 20 + 32."""
    five = 5
    fast = [(20.0, 32.0)] * five
    slow = [(20.0, 32.0), (20.0, 32.0), (20.0, 33.0), (20.0, 32.0), (20.0, 32.0)]  # round 2 counts
    variants = {
        "eager": variant("baseline", [(40.0, 50.0)] * five, [(40.0, 50.0)] * five),
        "compile": variant(
            "baseline", [(30.0, 42.0)] * five, [(29.0, 42.0)] * five, copied_bytes=2.0**20
        ),
        "dual_batch": variant(
            "ours", fast, slow, copied_bytes=3 * 2.0**20, peak_mib=105.0, recorded_ms=7.0,
            says="stack forward: 1 CUDA graph\nstack backward: 1 CUDA graph",
        ),
        "compile, no collectives": variant(
            "without", [(13.0, 25.0)] * five, [(13.0, 25.0)] * five, gradient_error=None
        ),
    }  # fmt: skip
    return {
        "case": "8b-2x4096", "link": link, "connections": "1", "ranks": 2, "rounds": five,
        "executor": "inductor",
        "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "environment": {},
        "commit": "abc", "command": "dynaflow bench", "variants": variants,
        "skipped": {"compile+graph": "no graphs here"}, "failed": {"nanoflow": "rank 1: broke"},
    }  # fmt: skip
