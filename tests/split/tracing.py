"""Traces functions with one symbolic batch, and runs nodes on parts of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from dynaflow_train.split import Analysis, Info, analyse
from dynaflow_train.split.axis import plain_by_shape
from dynaflow_train.split.table import SIZE_OPERATORS, packet_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sympy

    from dynaflow_train.ir import Axis

BATCH = 6


@dataclass
class Traced:
    """A graph with a symbolic batch, its verdicts, and the values of every node at full size."""

    graph: fx.Graph
    analysis: Analysis
    symbol: sympy.Symbol
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def modes(self, packet: str | None = None) -> list[str]:
        """The verdicts, of one operator."""
        return [m for n, m in self.analysis.modes.items() if packet in (None, packet_name(n))]


def trace(
    function: Callable[..., Any], tensors: Sequence[Tensor], batch_dims: Sequence[int | None]
) -> Traced:
    """Trace `function`; tensor i carries the batch on dimension `batch_dims[i]`, or not at all."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for tensor, dim in zip(tensors, batch_dims, strict=True):
        sizes = [DimDynamic.DUCK if d == dim else DimDynamic.STATIC for d in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    with mode:
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    graph = module.graph
    places = [n for n in graph.nodes if n.op == "placeholder"]
    symbol = next(
        f.shape[d].node.expr for f, d in zip(fakes, batch_dims, strict=True) if d is not None
    )
    given = {p: plain_by_shape(f, symbol) for p, f in zip(places, fakes, strict=True)}
    traced = Traced(graph, analyse(graph, given, symbol), symbol)
    for node in graph.nodes:
        if node.op == "placeholder":
            traced.values[node] = tensors[places.index(node)]
        elif node.op == "get_attr":
            traced.values[node] = getattr(module, str(node.target))
        elif node.op == "call_function":
            traced.values[node] = call(node, traced, traced.values.get, BATCH)
    return traced


def call(node: fx.Node, traced: Traced, value: Callable[[fx.Node], Any], size: int) -> Any:
    """Run one node; sizes that follow the batch are those of `size` samples."""
    shrinks, fills = packet_name(node) in SIZE_OPERATORS, packet_name(node) in ("full", "new_full")

    def number(arg: Any, *, part: bool) -> Any:
        if isinstance(arg, fx.Node):
            found = arg.meta["val"]
            if not isinstance(found, torch.SymInt | torch.SymFloat):
                return value(arg)
            arg = found
        if isinstance(arg, torch.SymInt | torch.SymFloat):
            kind = int if isinstance(arg, torch.SymInt) else float
            return kind(arg.node.expr.xreplace({traced.symbol: size if part else BATCH}))
        return arg

    args = [
        fx.node.map_aggregate(a, lambda x, i=i: number(x, part=shrinks and not (fills and i == 1)))
        for i, a in enumerate(node.args)
    ]
    kwargs = {
        k: fx.node.map_aggregate(v, lambda x: number(x, part=shrinks))
        for k, v in node.kwargs.items()
    }
    if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return args[0].reshape(args[1])
    if packet_name(node) == "as_strided":  # only where rows are packed: see `rules.as_strided`
        return args[0].reshape(args[1])
    return node.target(*args, **kwargs)


def part(tensor: Any, info: Info, start: int, size: int) -> Any:
    """Samples `start` up to `start + size`."""
    if not isinstance(tensor, Tensor) or info.axis is None:
        return tensor
    return rows_of(tensor, info.axis, start, size)


def rows_of(tensor: Tensor, axis: Axis, start: int, size: int) -> Tensor:
    """The rows of some samples, in order."""
    dim, outer, inner = axis.dim, int(axis.outer), int(axis.inner)
    shape = (outer, tensor.shape[dim] // (outer * inner), inner)
    rows = tensor.unflatten(dim, shape).narrow(dim + 1, start, size)
    return rows.flatten(dim, dim + 2)


def check_node(node: fx.Node, traced: Traced, cuts: Sequence[int]) -> None:
    """Assert that running `node` on parts of its inputs gives parts of its result, or addends.

    Raises:
        AssertionError: it does not; the verdict "split" is wrong.
    """
    infos, found, start = traced.analysis.infos, [], 0
    for size in cuts:

        def value(arg: fx.Node, start: int = start, size: int = size) -> Any:
            whole = traced.values[arg]
            if arg in traced.analysis.tuples:
                return tuple(
                    part(t, i, start, size)
                    for t, i in zip(whole, traced.analysis.tuples[arg], strict=True)
                )
            return part(whole, infos[arg], start, size)

        found.append(call(node, traced, value, size))
        start += size
    whole = traced.values[node]
    results = traced.analysis.tuples.get(node) or (infos.get(node),)
    wholes = whole if isinstance(whole, tuple | list) else (whole,)
    for index, (info, true) in enumerate(zip(results, wholes, strict=True)):
        pieces = [f[index] if isinstance(f, tuple | list) else f for f in found]
        if not isinstance(true, Tensor) or info.sharing == "own":
            continue
        if info.sharing == "partial":
            total = sum(p.double() for p in pieces)
            torch.testing.assert_close(total, true.double(), rtol=1e-4, atol=1e-5)
            continue
        start = 0
        for size, piece in zip(cuts, pieces, strict=True):
            torch.testing.assert_close(
                piece,
                part(true, info, start, size),
                rtol=1e-4,
                atol=1e-5,
                equal_nan=True,
                msg=lambda text, info=info: f"{node.format_node()} {info}: {text}",
            )
            start += size


def check_all(traced: Traced, cuts: Sequence[int] = (2, 3, 1)) -> None:
    """Check every node with the verdict "split", but for random ones."""
    for node, mode in traced.analysis.modes.items():
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if mode == "split" and not random:
            check_node(node, traced, cuts)
