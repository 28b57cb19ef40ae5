"""Copies the nodes of one op into a graph of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def extract(
    members: list[fx.Node], outputs: Collection[object], is_floating: Callable[[fx.Node], bool]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """The op's graph, the outer nodes it reads and those of its members that others read.

    Sizes (SymInt nodes) are not inputs: each use becomes a placeholder whose value is known before
    the op is compiled, so the copy keeps the expression in `meta["val"]`.

    Args:
        members: nodes of the op in topological order.
        outputs: the region's output nodes.
        is_floating: nodes to copy in wherever they are read.
    """
    own, graph = set(members), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: dict[fx.Node, None] = {}
    floating: dict[fx.Node, None] = {}
    sizes: dict[fx.Node, None] = {}

    def bring(node: fx.Node) -> None:
        if node in own:
            return
        if node.op != "placeholder" and is_floating(node):
            for arg in node.all_input_nodes:
                bring(arg)
            floating[node] = None
        elif isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float):
            sizes[node] = None
        else:
            inputs[node] = None

    for node in members:
        for arg in node.all_input_nodes:
            bring(arg)
    for node in (*inputs, *sizes):
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in (*floating, *members):
        env[node] = graph.node_copy(node, env.__getitem__)
    results = [n for n in members if _is_result(n, own, outputs)]
    graph.output(tuple(env[n] for n in results))
    owner = members[0].graph.owning_module
    module = fx.GraphModule(owner if owner is not None else torch.nn.Module(), graph)
    return module, list(inputs), results


def _is_result(node: fx.Node, own: set[fx.Node], outputs: Collection[object]) -> bool:
    """Whether others read a member; a tuple is read through its items, which are members too."""
    if isinstance(node.meta.get("val"), tuple | list):
        return False
    return node in outputs or any(u not in own and u.op != "output" for u in node.users)
