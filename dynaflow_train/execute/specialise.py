"""Turns an op's graph with symbolic sizes into one with numbers, for one number of samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from dynaflow_train.execute.into import Written, factors, write_into
from dynaflow_train.execute.meta import Meta
from dynaflow_train.ir import is_row_major

Symbols = Mapping[sympy.Symbol, int]
Operand = Meta | tuple[Meta, ...]


@dataclass(frozen=True)
class Sizes:
    """Values of the symbols: sizes shrink with the micro-batch (`part`), all else is `full`."""

    part: Symbols
    full: Symbols
    is_size: Callable[[fx.Node], bool]

    def number(self, value: Any, *, size: bool) -> Any:
        """A SymInt or SymFloat as a number; anything else as it is."""
        if isinstance(value, torch.SymInt | torch.SymFloat):
            kind = int if isinstance(value, torch.SymInt) else float
            return kind(value.node.expr.xreplace(dict(self.part if size else self.full)))
        return value


@dataclass(frozen=True)
class Static:
    """A graph with numbers only, and the fake tensors that went in and come out.

    Attributes:
        written: of the outputs that are written into a slice, how.
        factors: of the outputs that are matrix products and nothing else, the two matrices.
    """

    graph: fx.GraphModule
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    fake_mode: FakeTensorMode
    written: Mapping[int, Written]
    factors: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


def _sized_args(node: fx.Node, sizes: Sizes, env: dict[fx.Node, Any]) -> tuple[tuple, dict]:
    shrinks = sizes.is_size(node)
    fills = getattr(node.target, "__name__", "").startswith(("full.", "new_full."))

    def number(value: Any, *, size: bool) -> Any:
        if isinstance(value, fx.Node) and value not in env:
            return sizes.number(value.meta["val"], size=size)
        return env[value] if isinstance(value, fx.Node) else sizes.number(value, size=size)

    args = tuple(
        map_aggregate(arg, lambda a, at=at: number(a, size=shrinks and not (fills and at == 1)))
        for at, arg in enumerate(node.args)
    )
    kwargs = {
        k: map_aggregate(v, lambda a: number(a, size=shrinks)) for k, v in node.kwargs.items()
    }
    return args, kwargs


def specialise(
    graph: fx.GraphModule,
    metas: Sequence[Operand],
    sizes: Sizes,
    stores: Mapping[int, Meta | None],
    added: Collection[int] = (),
    *,
    eager: bool = False,
) -> Static:
    """Copy `graph` with every size a number.

    Args:
        graph: an op's graph; tensor placeholders first, then sizes.
        metas: of the tensor placeholders; several for one that the graph gets as addends.
        sizes: the values of the symbols.
        stores: output index -> meta of a slice that the graph gets as one more input and writes
            that output into, in place of returning it; None: it returns the output's factors.
        added: those of `stores` whose output is added to what is there.
        eager: it will run operator by operator.
    """
    # Sizes are numbers; without an environment for symbols Inductor does not use its cache on disk.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    new = fx.Graph()
    nodes: dict[fx.Node, Any] = {}
    fakes: dict[fx.Node, Any] = {}
    written: dict[int, Written] = {}
    with unset_fake_temporarily():
        inputs, addends = _inputs(graph, new, metas, nodes, fakes, mode)
        slices = {}
        for index, meta in stores.items():
            if meta is not None:
                slices[index] = new.placeholder(f"into_{index}")
                slices[index].meta["val"] = _fake(meta, mode)
                inputs.append(slices[index].meta["val"])
        for node, places in addends.items():
            nodes[node] = new.call_function(torch.ops.aten.add.Tensor, tuple(places))
            with mode:
                fakes[node] = torch.add(*(place.meta["val"] for place in places))
            nodes[node].meta["val"] = fakes[node]
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                nodes[node] = new.node_copy(node)
                fakes[node] = getattr(graph, str(node.target))
            elif node.op == "call_function" and not _is_number(node):
                _copy(node, new, sizes, nodes, fakes, mode)
        ends = list(cast("Any", graph.graph.output_node().args[0]))
        outputs = [slices[i].meta["val"] if i in slices else fakes[n] for i, n in enumerate(ends)]
        alone = [ends.count(end) == 1 for end in ends]
        found = {i: factors(nodes[n], alone=alone[i]) for i, n in enumerate(ends)}
        products = {i: pair for i, pair in found.items() if pair is not None}
        kept = [i for i in range(len(ends)) if i not in slices]
        results = [products[i] if i in stores else (nodes[ends[i]],) for i in kept]
        new.output(tuple(node for each in results for node in each))
        with mode, new.inserting_before(new.output_node()):
            for index, into in slices.items():
                add, made = index in added, nodes[ends[index]]
                written[index] = write_into(into, made, alone=alone[index], add=add, eager=eager)
    values = {i: (a.meta["val"], b.meta["val"]) for i, (a, b) in products.items()}
    return Static(fx.GraphModule(graph, new), inputs, outputs, mode, written, values)


def _inputs(
    graph: fx.GraphModule,
    new: fx.Graph,
    metas: Sequence[Operand],
    nodes: dict[fx.Node, Any],
    fakes: dict[fx.Node, Any],
    mode: FakeTensorMode,
) -> tuple[list[torch.Tensor], dict[fx.Node, list[fx.Node]]]:
    """Placeholders for all tensors, their values, and those of inputs that come as addends."""
    tensors = [n for n in graph.graph.nodes if n.op == "placeholder" and not _is_number(n)]
    inputs: list[torch.Tensor] = []
    addends: dict[fx.Node, list[fx.Node]] = {}
    for node, meta in zip(tensors, metas, strict=True):
        several = (meta,) if isinstance(meta, Meta) else meta
        places = _placeholders(new, node.name, several, mode)
        inputs += [place.meta["val"] for place in places]
        nodes[node], fakes[node] = places[0], places[0].meta["val"]
        if len(places) > 1:
            addends[node] = places
    return inputs, addends


def _placeholders(
    graph: fx.Graph, name: str, metas: Sequence[Meta], mode: FakeTensorMode
) -> list[fx.Node]:
    # The cache does not see that all outputs keep their strides: by this name nobody else's graph
    # is taken for one of ours. (Inductor reads how a name begins.)
    ends = ["", *(f"_{number}" for number in range(1, len(metas)))]
    places = [graph.placeholder(f"{name}_dynaflow{end}") for end in ends]
    for place, meta in zip(places, metas, strict=True):
        place.meta["val"] = _fake(meta, mode)
    return places


def _copy(
    node: fx.Node, new: fx.Graph, sizes: Sizes, nodes: dict, fakes: dict, mode: FakeTensorMode
) -> None:
    args, kwargs = _sized_args(node, sizes, nodes)
    fake_args, fake_kwargs = _sized_args(node, sizes, fakes)
    target = node.target
    if target is torch.ops.aten.as_strided.default and _is_reshape(node):
        target, args, fake_args = torch.ops.aten.reshape.default, args[:2], fake_args[:2]
    with mode:
        if target in _VIEWS and not _is_viewable(*fake_args):
            target = torch.ops.aten.reshape.default  # rows of a micro-batch stand apart: [s, b, h]
        fakes[node] = target(*fake_args, **fake_kwargs)  # type: ignore[operator]
    nodes[node] = new.create_node("call_function", target, args, kwargs, node.name)
    nodes[node].meta["val"] = fakes[node]


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _is_reshape(node: fx.Node) -> bool:
    """Whether an `as_strided` only regroups packed rows; a micro-batch's may lie otherwise."""
    offset = node.args[3] if len(node.args) > 3 else 0
    return not offset and all(
        is_row_major(value.shape, value.stride())
        for value in (node.args[0].meta["val"], node.meta["val"])  # type: ignore[union-attr]
    )


def _is_viewable(tensor: torch.Tensor, shape: list[int]) -> bool:
    try:
        tensor.view(shape)
    except (ValueError, RuntimeError):
        return False
    return True


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _fake(meta: Meta, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return meta.empty()


def canonical(graph: fx.GraphModule) -> str:
    """A text that is equal for equal graphs, whatever their nodes are called."""
    number: dict[fx.Node, str] = {}
    lines = []
    for index, node in enumerate(graph.graph.nodes):
        value = node.meta.get("val")
        symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
        number[node] = f"<{value.node.expr}>" if symbolic else f"%{index}"
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Text(number[n]))
        name = node.target if node.op == "call_function" else ""
        if node.op == "get_attr":
            name = id(getattr(graph, str(node.target)))
        lines.append(number[node] if symbolic else f"{node.op} {name} {args}")
    return "\n".join(lines)


class _Text(str):
    """Prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
