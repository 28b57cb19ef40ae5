"""Joins the graphs of a chain of ops into one, for a kernel that replaces them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from dynaflow_train.partition.collectives import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.ir import Op


def chain(ops: Sequence[Op], inputs: Sequence[str], outputs: Sequence[str]) -> fx.GraphModule:
    """One graph from value names `inputs` to value names `outputs`.

    Collectives are followed by their wait, so that the graph means the same without an engine.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    sources = [(op, node) for op in ops if op.graph is not None for node in op.graph.graph.nodes]
    for name in inputs:
        node = next(n for _, n in sources if n.op == "placeholder" and n.name == name)
        env[name] = graph.placeholder(name)
        env[name].meta = dict(node.meta)
    root = torch.nn.Module()
    for _, node in sources:
        if node.op == "placeholder" and node.name not in env and _is_size(node):
            env[node.name] = graph.placeholder(node.name)
            env[node.name].meta = dict(node.meta)
    for op, node in sources:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(op.graph, str(node.target)))
        if node.op in ("get_attr", "call_function") and node.name not in env:
            new = graph.node_copy(node, lambda n: env[n.name])
            if kind_of(node):
                new = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (new,))
                new.meta = dict(node.meta)
            env[node.name] = new
    graph.output(tuple(env[name] for name in outputs))
    return fx.GraphModule(root, graph)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)
