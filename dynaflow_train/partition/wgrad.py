"""Tells the gradients of parameters (wgrad) from the gradients that flow on (dgrad).

Critical is what an input's gradient or a collective needs. What is left only feeds parameter
gradients; of that, matrix products (and what exists for them alone) become wgrad ops. Cheap
reductions, such as a norm's weight gradient, stay fused with the op that computes their input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterable

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "grouped_wgrad"}
_TABLES = {"index_put", "embedding_dense_backward", "_unsafe_masked_index_put_accumulate"}


def above(nodes: Iterable[object]) -> set[fx.Node]:
    """The nodes among these, and everything that they need."""
    found: set[fx.Node] = set()
    stack = [node for node in nodes if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def wgrad_nodes(
    graph: fx.Graph, flowing: Iterable[object], heavy_names: dict[fx.Node, str]
) -> dict[fx.Node, fx.Node]:
    """Every node of a wgrad, with the matrix product it belongs to.

    Args:
        graph: backward graph.
        flowing: outputs that are gradients of inputs, and all collectives.
        heavy_names: packet name of every call_function node.
    """
    critical = above(flowing)
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:  # downward: the products and what only follows from them
        if node.op != "call_function" or node in critical:
            continue
        if heavy_names.get(node) in _PRODUCTS | _TABLES:
            owner[node] = node
        else:
            for source in node.all_input_nodes:
                if source in owner:
                    owner.setdefault(node, owner[source])
    for node in reversed(graph.nodes):  # upward: what exists for them alone
        if node.op != "call_function" or node in critical or node in owner or not node.users:
            continue
        if all(user in owner for user in node.users):
            owner[node] = owner[next(iter(node.users))]
    return owner
