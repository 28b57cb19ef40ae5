"""Regions without graphs: Llama-like layers, and DAGs drawn by hypothesis."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from dynaflow_train.ir import Axis, Op, Region, Value
from dynaflow_train.strategy import Strategy

GFLOP = 10**9


class Builder:
    """Adds ops one by one; each makes one value of its own name."""

    def __init__(self, phase: str, name: str = "model") -> None:
        self.phase, self.name = phase, name
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {"x": Value("x", "batch", Axis(0))}

    def add(self, name: str, *inputs: str, sharing: str = "batch", **fields) -> str:
        if fields.get("collective"):
            fields |= {"kind": "communication", "group": fields.get("group", "tp")}
        fields.setdefault("kind", "compute")
        self.ops.append(Op(name, inputs=tuple(inputs), outputs=(f"{name}:0",), **fields))
        value = f"{name}:0"
        self.values[value] = Value(value, sharing, Axis(0) if sharing == "batch" else None)
        return value

    def region(self, *outputs: str, **fields) -> Region:
        return Region(
            self.name, self.phase, tuple(self.ops), self.values, ("x",), outputs, **fields
        )


def llama_forward(layers: int = 2, *, comm_bytes: int = 100_000_000, **fields) -> Region:
    """norm, attention, all_reduce, add + norm, mlp, all_reduce, and so on."""
    b, x = Builder("forward"), "x"
    for layer in range(layers):
        for block, flops in (("self_attn", 300), ("mlp", 500)):
            at = f"layers.{layer}.{block}"
            at_layer = {"layer": layer}
            n = b.add(f"{at}_norm", x, kind="memory", bytes=100_000_000, **at_layer)
            p = b.add(at, n, flops=flops * GFLOP, **at_layer)
            r = b.add(f"{at}.all_reduce", p, collective="all_reduce", bytes=comm_bytes, **at_layer)
            x = b.add(f"{at}_add", x, r, kind="memory", bytes=100_000_000, **at_layer)
    return b.region(x, **fields)


def llama_backward(layers: int = 2, *, comm_bytes: int = 100_000_000, **fields) -> Region:
    """Per block: dgrad, its all_reduce, wgrads beside it, the norm's backward."""
    b, x, outputs = Builder("backward"), "x", []
    for layer in reversed(range(layers)):
        for block, flops in (("mlp", 500), ("self_attn", 300)):
            at = f"layers.{layer}.{block}"
            at_layer = {"layer": layer}
            d = b.add(f"{at}.dgrad", x, flops=flops * GFLOP, **at_layer)
            r = b.add(f"{at}.all_reduce", d, collective="all_reduce", bytes=comm_bytes, **at_layer)
            work = {"is_wgrad": True, "flops": flops * GFLOP // 2, **at_layer}
            for part in (f"{at}.in.wgrad", f"{at}.out.wgrad"):
                outputs += [b.add(part, x, d, sharing="partial", **work)]
            x = b.add(f"{at}_norm", x, r, kind="memory", bytes=100_000_000, **at_layer)
    return b.region(x, *outputs, **fields)


@st.composite
def dags(draw: st.DrawFn, max_ops: int = 9) -> Region:
    """Any DAG: merged ops, collectives of two groups, several inputs."""
    b = Builder("forward")
    made = ["x"]
    for index in range(draw(st.integers(1, max_ops))):
        inputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        kind = draw(st.sampled_from(["compute", "memory", "communication"]))
        merged = draw(st.booleans()) and draw(st.booleans())
        fields = {"collective": "all_reduce", "group": draw(st.sampled_from(["tp", "dp"]))}
        made.append(
            b.add(
                f"op{index}",
                *inputs,
                kind=kind,
                merged=merged,
                flops=GFLOP,
                **(fields if kind == "communication" else {}),
            )
        )
    return b.region(made[-1])


class AnySchedule(Strategy):
    """Issues a random legal schedule: any order, merged runs, any of three streams."""

    def __init__(self, seed: int, parts: int) -> None:
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "parts", parts)

    def schedule(self, s):
        pick = random.Random(self.seed)
        s.split(self.parts)
        while ready := s.get_ready_ops():
            op = pick.choice(ready)
            together = [op]
            for each in ready[ready.index(op) + 1 :]:
                adjacent = each.op == op.op and (
                    each.micro_batch.index == together[-1].micro_batch.index + 1
                )
                if adjacent and pick.random() < 0.4:
                    together.append(each)
            s.execute(together, stream=pick.choice(["compute", "comm", "copy"]))
