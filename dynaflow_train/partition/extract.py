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
    inputs: list[fx.Node] = []

    def bring(node: fx.Node) -> None:
        if node in env or node in own:
            return
        if node.op != "placeholder" and is_floating(node):
            for arg in node.all_input_nodes:
                bring(arg)
            floating.append(node)
        elif isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float):
            sizes.append(node)
        elif node not in inputs:
            inputs.append(node)

    floating: list[fx.Node] = []
    sizes: list[fx.Node] = []
    for node in members:
        for arg in node.all_input_nodes:
            bring(arg)
    for node in (*inputs, *dict.fromkeys(sizes)):
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in (*dict.fromkeys(floating), *members):
        env[node] = graph.node_copy(node, env.__getitem__)
    results = [
        n
        for n in members
        if not isinstance(n.meta.get("val"), tuple | list)
        and (n in outputs or any(user not in own and user.op != "output" for user in n.users))
    ]
    graph.output(tuple(env[n] for n in results))
    owner = members[0].graph.owning_module
    return fx.GraphModule(owner if owner is not None else torch.nn.Module(), graph), inputs, results
