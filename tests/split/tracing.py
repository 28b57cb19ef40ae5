"""Traces functions with one symbolic batch, and holds every verdict "split" against its meaning.

Running a node on the parts of a batch gives the parts of its result, or addends of it; and what
one sample holds changes no other sample's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
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
from dynaflow_train.split.table import SIZE_OPERATORS, Rules, packet_name
from tests.split.stand_ins import STAND_INS

if TYPE_CHECKING:
    import sympy

    from dynaflow_train.ir import Axis

BATCH = 6
Read = Callable[[fx.Node], Any]


@dataclass
class Traced:
    """A graph with a symbolic batch, its verdicts, and the values of every node at full size."""

    module: fx.GraphModule
    analysis: Analysis
    symbol: sympy.Symbol
    values: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def modes(self, packet: str | None = None) -> list[str]:
        """The verdicts, of one operator."""
        return [m for n, m in self.analysis.modes.items() if packet in (None, packet_name(n))]

    def merged_before(self) -> list[bool]:
        """For every output whether anything on the way to it is merged."""
        found: dict[fx.Node, bool] = {}
        for node in self.graph.nodes:
            before = any(found[a] for a in node.all_input_nodes)
            found[node] = before or self.analysis.modes.get(node) == "merged"
        return [found[n] for n in self.graph.output_node().all_input_nodes]


def trace(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    batch_dims: Sequence[int | None],
) -> Traced:
    """Trace `function`; tensor i carries the batch on dimension `batch_dims[i]`, or not at all.

    What has a rule stays as it is called; the rest is decomposed as in the backend.

    Raises:
        ValueError: the function has a result for `BATCH` samples only.
    """
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes = []
    for tensor, dim in zip(tensors, batch_dims, strict=True):
        sizes = [DimDynamic.DUCK if d == dim else DimDynamic.STATIC for d in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    symbol = next(
        f.shape[d].node.expr for f, d in zip(fakes, batch_dims, strict=True) if d is not None
    )
    with mode, enable_python_dispatcher():
        module = make_fx(lambda *xs: function(*xs), decomposition_table=decompositions())(*fakes)
    if symbol in shapes.replacements:
        raise ValueError(f"the function fixes the batch: {symbol} = {shapes.replacements[symbol]}")
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    given = {p: plain_by_shape(f, symbol) for p, f in zip(places, fakes, strict=True)}
    traced = Traced(module, analyse(module.graph, given, symbol), symbol)
    traced.values = run(traced, dict(zip(places, tensors, strict=True)))
    return traced


@functools.cache
def decompositions() -> dict[Any, Any]:
    """The backend's, less those of operators that have a rule."""
    graph, rules = fx.Graph(), Rules()
    table = select_decomp_table().items()
    return {op: how for op, how in table if rules.find(graph.call_function(op)) is None}


def run(traced: Traced, given: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """All values, from those that are given."""
    values = dict(given)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(traced.module, str(node.target))
        elif node.op == "call_function" and node not in values:
            values[node] = call(node, traced, values.__getitem__, BATCH)
    return values


def is_random(node: fx.Node) -> bool:
    """Whether it draws: then two runs differ."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "empty" in packet_name(node)


def call(node: fx.Node, traced: Traced, read: Read, size: int) -> Any:
    """Run one node; sizes that follow the batch are those of `size` samples, as in the engine."""
    shrinks, fills = packet_name(node) in SIZE_OPERATORS, packet_name(node) == "full"

    def number(arg: Any, *, part: bool) -> Any:
        if isinstance(arg, fx.Node):
            found = arg.meta.get("val")
            if not isinstance(found, torch.SymInt | torch.SymFloat):
                return read(arg)
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
    if packet_name(node) in ("view", "_unsafe_view") and isinstance(args[1], list | tuple):
        return args[0].reshape(args[1])
    if packet_name(node) == "as_strided":  # only where rows are packed: see `rules.as_strided`
        return args[0].reshape(args[1])
    return STAND_INS.get(packet_name(node), node.target)(*args, **kwargs)


def rows(tensor: Tensor, axis: Axis, start: int, size: int) -> Tensor:
    """The rows of samples `start` up to `start + size`, in order."""
    dim, outer, inner = axis.dim, int(axis.outer), int(axis.inner)
    shape = (outer, tensor.shape[dim] // (outer * inner), inner)
    return tensor.unflatten(dim, shape).narrow(dim + 1, start, size).flatten(dim, dim + 2)


def infos_of(node: fx.Node, traced: Traced) -> tuple[Info, ...]:
    """One a result."""
    found = traced.analysis
    return found.tuples[node] if node in found.tuples else (found.infos[node],)


def results(value: Any) -> tuple[Any, ...]:
    """One or several results as several."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def check(traced: Traced, cuts: Sequence[int] = (2, 3, 1)) -> None:
    """Hold every verdict against its meaning.

    Raises:
        AssertionError: a verdict "split" is wrong; the message names the node.
    """
    check_parts(traced, cuts)
    for sample in (0, BATCH - 1):
        check_others(traced, sample)


def check_parts(traced: Traced, cuts: Sequence[int]) -> None:
    """Parts in, parts out: equal to the rows of the whole, or they sum to it."""
    own: list[dict[fx.Node, Any]] = [{} for _ in cuts]  # addends, and what has no axis
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    for node, mode in traced.analysis.modes.items():
        if mode != "split":
            continue
        found = []
        for part, start, size in zip(own, starts, cuts, strict=True):

            def read(arg: fx.Node, part: Any = part, start: int = start, size: int = size) -> Any:
                if arg in part:
                    return part[arg]
                several = isinstance(traced.values[arg], tuple | list)
                parts = tuple(
                    v if i.axis is None else rows(v, i.axis, start, size)
                    for v, i in zip(results(traced.values[arg]), infos_of(arg, traced), strict=True)
                )
                return parts if several else parts[0]

            found.append(call(node, traced, read, size))
        infos = infos_of(node, traced)
        if any(i.axis is None for i in infos):
            for part, value in zip(own, found, strict=True):
                part[node] = value
        _compare(node, infos, results(traced.values[node]), [results(f) for f in found], cuts)


def _compare(
    node: fx.Node, infos: Any, wholes: Any, found: list[tuple[Any, ...]], cuts: Sequence[int]
) -> None:
    for index, (info, whole) in enumerate(zip(infos, wholes, strict=True)):
        pieces = [f[index] for f in found]
        if not isinstance(whole, Tensor):
            continue
        if info.sharing == "rows":  # in an order of their own; who puts them back is compared
            continue
        if info.sharing == "own":  # what nobody adds up: a random state
            assert whole.dim() == 0 or not whole.is_floating_point(), node.format_node()
            continue
        assert info.sharing in ("batch", "partial"), f"{node.format_node()}: {info}"
        if info.sharing == "partial":
            pieces, wanted = [sum(p.double() for p in pieces)], [whole.double()]
        else:
            starts = [sum(cuts[:i]) for i in range(len(cuts))]
            wanted = [rows(whole, info.axis, a, n) for a, n in zip(starts, cuts, strict=True)]
        for piece, true in zip(pieces, wanted, strict=True):
            if is_random(node):
                assert piece.shape == true.shape, node.format_node()
                continue
            coarse = whole.dtype == torch.bfloat16
            torch.testing.assert_close(
                piece,
                true,
                rtol=2e-2 if coarse else 1e-4,
                atol=2e-2 if coarse else 1e-5,
                equal_nan=True,
                msg=lambda text, info=info: f"{node.format_node()} {info}: {text}",
            )


def check_others(traced: Traced, sample: int) -> None:
    """Change one sample of every input: where it was cut, no other sample's rows change.

    Behind a merged node, or a draw, nothing is claimed.
    """
    given = {
        n: changed(v, traced.analysis.infos[n].axis, sample)
        for n, v in traced.values.items()
        if n.op == "placeholder"
    }
    after, mixed = run(traced, given), set[fx.Node]()
    for node, mode in traced.analysis.modes.items():
        if mode == "merged" or is_random(node) or any(a in mixed for a in node.all_input_nodes):
            mixed.add(node)
            continue
        pairs = zip(results(traced.values[node]), results(after[node]), strict=True)
        for info, (old, new) in zip(infos_of(node, traced), pairs, strict=True):
            if mode != "split" or info.axis is None or not isinstance(old, Tensor):
                continue
            for other in set(range(BATCH)) - {sample}:
                kept = [rows(v, info.axis, other, 1) for v in (old, new)]
                message = f"{node.format_node()}: sample {other} sees sample {sample}"
                assert torch.equal(*(k.nan_to_num() for k in kept)), message


def changed(value: Tensor, axis: Axis | None, sample: int) -> Tensor:
    """A copy in which one sample holds something else: numbers half as large again, or its
    neighbour's indices, or the contrary of what was true."""
    if axis is None:
        return value
    value = value.clone()
    here, there = (value.narrow(axis.dim, s % BATCH, 1) for s in (sample, sample + 1))
    if value.dtype == torch.bool:
        here.logical_not_()
    elif value.is_floating_point() or value.is_complex():
        here.mul_(1.5)
    else:
        here.copy_(there.clone())
    return value
