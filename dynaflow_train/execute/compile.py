"""Compiles ops: Inductor, or eager for debugging. Equal ops are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dynaflow_train.execute.meta import Meta
from dynaflow_train.execute.specialise import Operand, Sizes, Static, canonical, specialise

if TYPE_CHECKING:
    from dynaflow_train.ir import Op

Executor = Literal["inductor", "eager"]
Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class CompiledOp:
    """One op for one number of samples.

    Attributes:
        call: takes the op's tensors, then the slices of `stores`; returns the outputs that have no
            slice, or their two factors where `stores` asks for them.
        outputs: metas of all outputs, stored ones included.
        copied: outputs that are copied into their slice, after they were computed.
        fresh: for each output whether it has storage of its own: no input's, no other output's.
        factors: output -> the matrices whose product it is, where it can be made of them in parts.
    """

    call: Function
    outputs: tuple[Meta, ...]
    fresh: tuple[bool, ...]
    copied: frozenset[int]
    factors: Mapping[int, tuple[Meta, Meta]]


@dataclass
class OpCompiler:
    """Compiles and remembers.

    Attributes:
        executor: "inductor" or "eager".
        reuse, direct: False compiles equal ops anew, and lets results be copied into buffers that
            others share instead of made there: what each is worth (`dynaflow bench --ablation`).
        compiled, reused: counts, for the report.
    """

    executor: Executor
    reuse: bool = True
    direct: bool = True
    compiled: int = 0
    reused: int = 0
    _known: dict[Any, CompiledOp] = field(default_factory=dict)
    _texts: dict[int, tuple[Op, str]] = field(default_factory=dict)

    def compile(
        self,
        op: Op,
        metas: Sequence[Operand],
        sizes: Sizes,
        stores: Mapping[int, Meta | None],
        added: Collection[int] = (),
    ) -> CompiledOp:
        """The op on inputs of these metas; see `specialise` for the arguments."""
        assert op.graph is not None, "ops of a plan's text are never compiled"
        if id(op) not in self._texts:
            self._texts[id(op)] = (op, canonical(op.graph))
        key = (
            self._texts[id(op)][1],
            tuple(metas),
            tuple(sorted(stores.items())),
            tuple(sorted(added)),
            tuple(sizes.part.values()),
            tuple(sizes.full.values()),
        )
        if self.reuse and key in self._known:
            self.reused += 1
            return self._known[key]
        eager = self.executor == "eager"
        static = specialise(op.graph, metas, sizes, stores, added, eager=eager or op.ragged)
        if eager or (op.ragged and op.is_communication):
            call = _eager(static)
        else:
            call = _any_size(static) if op.ragged else self._inductor(static)
        self.compiled += 1
        copied = frozenset(i for i, how in static.written.items() if how == "copied")
        taken = {_storage(t) for t in static.inputs}
        factors = {
            i: (Meta.of(left), Meta.of(right))
            for i, (left, right) in static.factors.items()
            if _storage(left) not in taken  # what came in may be dropped while parts are made
        }
        self._known[key] = CompiledOp(
            call, tuple(Meta.of(v) for v in static.outputs), fresh(static), copied, factors
        )
        return self._known[key]

    def chain(self, graph: fx.GraphModule) -> Function:
        """A chain of ops with numbers for sizes, its collectives and their waits inside."""
        if self.executor == "eager":
            return _boxed(graph)
        fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        mode = next(f.fake_mode for f in fakes)
        return self._inductor(Static(graph, fakes, [], mode, {}, {}))

    def _inductor(self, static: Static) -> Function:
        nodes = [n for n in static.graph.graph.nodes if n.op == "call_function"]
        if not nodes:
            return _eager(static)
        output = next(iter(reversed(static.graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        context = TracingContext(static.fake_mode)
        with unset_fake_temporarily(), tracing(context), V.set_fake_mode(static.fake_mode):
            compiled = compile_fx_inner(
                static.graph, static.inputs, cudagraphs=BoxedBool(False), is_inference=False
            )
        return getattr(compiled, "current_callable", None) or compiled


def _any_size(static: Static) -> Function:
    """Inductor by way of Dynamo: from the second number of rows on it is a symbol."""
    forward = torch.compile(static.graph.forward, fullgraph=True)
    return lambda args: forward(*args)


def _eager(static: Static) -> Function:
    return _boxed(static.graph)


def _boxed(graph: fx.GraphModule) -> Function:
    forward = graph.forward
    return lambda args: forward(*args)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def fresh(static: Static) -> tuple[bool, ...]:
    """For each output whether it has storage of its own: no input's, no other output's."""
    taken = [_storage(t) for t in static.inputs]
    made = [_storage(t) for t in static.outputs]
    return tuple(s not in taken and made.count(s) == 1 for s in made)
