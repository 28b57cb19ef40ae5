"""Sharded parameters enter a graph as their local tensors.

A DTensor that the graph only takes `to_local()` of becomes a plain input: AOTAutograd then sees no
subclass (torch 2.13 would pass its DeviceMesh through the graph as an opaque value, and every call
would pay for unwrapping), and parameters stay recognisable by their position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx


def localise(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[list[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Take `to_local()` out of Dynamo's graph, in place.

    Returns:
        the example inputs of the changed graph, and a function that gives a callable of local
        tensors the signature of Dynamo's graph.
    """
    inputs, places = list(example_inputs), []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(placeholders):
        given = inputs[place]
        if not isinstance(given, DTensor) or not node.users or not all(map(_to_local, node.users)):
            continue
        first = next(iter(node.users))
        # Fake and static: a real tensor that Dynamo does not know would get symbols of its own.
        local = first.meta["example_value"].detach().requires_grad_(given.requires_grad)
        inputs[place] = node.meta["example_value"] = local
        for user in list(node.users):
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        places.append(place)
    if places:
        gm.recompile()

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        if not places:
            return compiled

        def call(*arguments: Any) -> Any:
            given = list(arguments)
            for place in places:
                given[place] = given[place].to_local()  # its backward makes a DTensor again
            return compiled(*given)

        return call

    return inputs, wrap


def _to_local(node: fx.Node) -> bool:
    """A call of `to_local()` with no arguments: a method on 2.13, Dynamo's own closure on 2.11."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in {"to_local", "to_local_fn_with_prim_types"} and (
        len(node.args) == 1 and not node.kwargs
    )
