"""Which nodes communicate: kind and process group."""

from __future__ import annotations

import torch
from torch import fx

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


def ragged_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that take or give tensors whose size, or value on the host, run time alone knows."""
    ragged, touching = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        name = _name(node)[1] if _name(node)[0] == "dynaflow" else ""
        if name == "exchange_rows" and not node.args[2]:
            ragged.add(node)
        elif name not in ("exchange_rows", "grouped_wgrad") and (
            ragged.intersection(node.all_input_nodes)
        ):
            ragged.add(node)
        if name in _ROWS or ragged.intersection((node, *node.all_input_nodes)):
            touching.add(node)
    return touching
