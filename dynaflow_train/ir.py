"""The values that the stages hand on: Axis, Value, Op, Region, Launch, Plan.

All are frozen. A stage takes one of them and makes the next; nothing here knows a stage.

    capture -> graphs -> partition + split -> Region -> schedule -> Plan -> execute
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import sympy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import fx

Phase = Literal["forward", "backward", "inference"]
OpKind = Literal["compute", "communication", "memory"]
Sharing = Literal["batch", "shared", "partial", "own", "rows"]


@dataclass(frozen=True)
class Axis:
    """Where the batch lies in a tensor: dimension `dim` has size `outer * batch * inner`.

    A plain batch dimension has `outer == inner == 1`. Tokens flattened batch-first, [b*s], have
    `inner == s`; flattened sequence-first, [s*b], have `outer == s`.
    """

    dim: int
    outer: int | sympy.Expr = 1
    inner: int | sympy.Expr = 1

    def at(self, symbols: Mapping[sympy.Symbol, int]) -> tuple[int, int, int]:
        """`(dim, outer, inner)` as numbers, other symbols replaced by their values."""
        outer, inner = (
            int(cast("Any", f.xreplace(symbols))) if isinstance(f, sympy.Basic) else f
            for f in (self.outer, self.inner)
        )
        return self.dim, outer, inner


def is_row_major(shape: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether symbolic strides are those of packed rows of a symbolic shape."""
    step: Any = sympy.Integer(1)
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        size, found = (s.node.expr if hasattr(s, "node") else s for s in (size, found))
        if size != 1 and sympy.expand(found - step) != 0:
            return False
        step = step * size
    return True


@dataclass(frozen=True)
class Value:
    """What flows between ops.

    sharing:
        "batch": cut along `axis`; each micro-batch has its part, a merged op has the whole. Without
            an axis it is only known whole, and all its readers are merged.
        "shared": the same tensor for all micro-batches.
        "partial": one addend per micro-batch; whoever needs the whole sums them.
        "own": one tensor per micro-batch without a batch axis (a random state, say).
        "rows": likewise, but of its tokens, in an order of their own (sorted by expert, say).
    """

    name: str
    sharing: Sharing
    axis: Axis | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Op:
    """A named subgraph of a region, the unit a plan launches.

    Attributes:
        name: `layers.3.mlp.down_proj.wgrad`, unique in its region.
        kind: what it mostly uses: compute units, the interconnect, or memory bandwidth.
        inputs, outputs: names of the region's values.
        merged: it runs once, for all micro-batches together (it mixes samples, or depends on none).
        is_wgrad: it computes gradients of parameters only; nothing but `.grad` waits for it.
        layer: index of the decoder layer it stems from, or None.
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or None.
        group: name of the process group of the collective.
        flops: floating-point operations for the whole batch, bytes: tensor bytes read + written.
        reason: why it is merged, with source line, when it mixes samples.
        ragged: sizes of its tensors are known at run time only, or on the host only.
        graph: its aten graph with symbolic sizes; None in plans loaded from text and in tests.
    """

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    merged: bool = False
    is_wgrad: bool = False
    layer: int | None = None
    collective: str | None = None
    group: str | None = None
    flops: int = 0
    bytes: int = 0
    reason: str | None = None
    ragged: bool = False
    graph: fx.GraphModule | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def is_communication(self) -> bool:
        """Whether the op is one collective."""
        return self.kind == "communication"


@dataclass(frozen=True)
class Region:
    """One phase of one capture: its ops in a legal order, and its values.

    Attributes:
        name: "layers.0" or "model": what was captured.
        phase: which graph this is.
        ops: in an order in which every input precedes its reader.
        values: every value by name.
        inputs, outputs: value names at the boundary, in the graph's order (None: not a tensor).
        can_split: False when no value carries the batch; `why_not` then says why.
    """

    name: str
    phase: Phase
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    can_split: bool = True
    why_not: str | None = None

    @cached_property
    def op(self) -> dict[str, Op]:
        """Ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[str, Op]:
        """The op that makes each value; the region's inputs have none."""
        return {value: op for op in self.ops for value in op.outputs}

    @cached_property
    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """For each op the names of the ops whose outputs it reads, in order, each once."""
        made = self.producer
        return {
            op.name: tuple(dict.fromkeys(made[v].name for v in op.inputs if v in made))
            for op in self.ops
        }

    @cached_property
    def apart(self) -> frozenset[str]:
        """Ops that never run merged for some micro-batches: that would copy their rows together."""
        return frozenset(
            op.name
            for op in self.ops
            if any(self.values[v].sharing == "rows" for v in (*op.inputs, *op.outputs))
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what has to agree over ranks: op names, edges and collectives."""
        text = "\n".join(
            f"{op.name}|{op.kind}|{op.merged}|{op.collective}|{','.join(self.predecessors[op.name])}"
            for op in self.ops
        )
        return hashlib.sha256(f"{self.phase}\n{text}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Launch:
    """One op (or a chain of ops that one kernel replaces), for some micro-batches, on one stream.

    Attributes:
        ops: one op name; several when `kernel` replaces a chain.
        micro_batches: indices of adjacent micro-batches; several mean one merged run.
        stream: a named lane: "compute", "comm", "copy", ...
        kernel: name in the kernel registry, or None for the compiled op.
        waits: positions in the plan of launches on other streams to wait for before it starts.
    """

    ops: tuple[str, ...]
    micro_batches: tuple[int, ...]
    stream: str = "compute"
    kernel: str | None = None
    waits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A finished list of launches.

    Attributes:
        strategy: who made it.
        region: name of the region it is for.
        phase: forward, backward or inference.
        sizes: samples in each micro-batch; one entry when the batch is not cut.
        launches: in issue order, the same on every rank.
        reason: why it is sequential, when the strategy could not do what it is made for.
    """

    strategy: str
    region: str
    phase: Phase
    sizes: tuple[int, ...]
    launches: tuple[Launch, ...]
    reason: str | None = None

    @property
    def streams(self) -> tuple[str, ...]:
        """The lanes used, in order of first use."""
        return tuple(dict.fromkeys(launch.stream for launch in self.launches))


@dataclass(frozen=True)
class Interval:
    """When one launch of a plan really ran: measured by events on CUDA, by clocks on the CPU.

    Attributes:
        launch: position in the plan.
        start_ms, end_ms: milliseconds since the plan began. A collective ends when its transfer has
            ended, not when somebody waited for it.
    """

    launch: int
    start_ms: float
    end_ms: float
