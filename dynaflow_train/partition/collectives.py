"""Which nodes communicate: kind and process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Collection

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


_ROWS = {"exchange_rows": "all_to_all", "to_host": "copy_to_host"}


def _name(node: fx.Node) -> tuple[str, str]:
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, name = node.target._schema.name.split("::")
        return namespace, name
    return "", ""


def kind_of(node: fx.Node) -> str | None:
    """`all_reduce` and so on for a node that launches a collective, else None."""
    namespace, name = _name(node)
    if namespace == "dynaflow":
        return _ROWS.get(name)
    if namespace != "_c10d_functional" or name == "wait_tensor":
        return None
    return _KINDS.get(name, name)


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective (its last argument)."""
    return str(node.args[-1])


def drop_waits(graph: fx.Graph) -> None:
    """Remove `wait_tensor` nodes: the engine waits for a collective before its first reader."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _name(node)[1] == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def ragged_nodes(graph: fx.Graph, given: Collection[fx.Node] = ()) -> dict[fx.Node, bool]:
    """Nodes that have to do with sizes, or values on the host, that run time alone knows.

    Args:
        graph: a forward or a backward.
        given: placeholders of such size.

    Returns:
        each such node -> whether its result is of such size.
    """
    found: dict[fx.Node, bool] = dict.fromkeys(given, True)
    for node in graph.nodes:
        namespace, name = _name(node)
        name = name if namespace == "dynaflow" else ""
        reads = any(found.get(source, False) for source in node.all_input_nodes)
        if name in _ROWS:
            found[node] = name == "exchange_rows" and not node.args[2]
        elif reads:
            found[node] = name != "grouped_wgrad"
    return found
