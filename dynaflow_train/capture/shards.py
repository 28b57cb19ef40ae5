"""Sharded parameters enter a graph as their local tensors.

A DTensor that the graph only takes `to_local()` of becomes a plain input: AOTAutograd then sees no
subclass (torch 2.13 would pass its DeviceMesh through the graph as an opaque value, and every call
would pay for unwrapping), and parameters stay recognisable by their position.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

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

    return inputs, functools.partial(_of_locals, tuple(places))


def _of_locals(places: tuple[int, ...], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, given the local tensors of the DTensors in those places."""
    if not places:
        return compiled

    def call(*arguments: Any) -> Any:
        given, trained = list(arguments), list[int]()
        for place in places:
            if given[place].requires_grad and given[place].is_leaf:
                trained.append(place)
            else:  # frozen, or an activation, which may be partial or on its way
                given[place] = given[place].to_local()
        for place, local in zip(trained, locals_of([arguments[p] for p in trained]), strict=True):
            given[place] = local
        return compiled(*given)

    return call


def _to_local(node: fx.Node) -> bool:
    """A call of `to_local()` without arguments: a method on 2.13, on 2.11 Dynamo's own closure."""
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.target == "to_local":
        return True
    if getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    return not any(inspect.getclosurevars(node.target).nonlocals.values())  # pyright: ignore[reportArgumentType] - a function


def locals_of(sharded: Sequence[DTensor]) -> tuple[Tensor, ...]:
    """`to_local()` of each parameter, through one node of autograd: it costs the host least.

    The gradients have the parameters' placements.
    """
    return _Locals.apply(*sharded) if sharded else ()


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *sharded: DTensor) -> tuple[Tensor, ...]:
        ctx.laid_out = [(each._spec, each._local_tensor.stride()) for each in sharded]
        ctx.set_materialize_grads(False)
        return tuple(each._local_tensor.detach() for each in sharded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for gradient, (spec, stride) in zip(gradients, ctx.laid_out, strict=True):
            if gradient is not None:
                spec = spec if gradient.stride() == stride else _spec_of(gradient, spec)
                # What `from_local` ends in, without its checks.
                found.append(DTensor(gradient, spec, requires_grad=False))
            else:
                found.append(None)
        return tuple(found)


def _spec_of(gradient: Tensor, like: DTensorSpec) -> DTensorSpec:
    """`like`, its dimensions in the order in which the gradient has them in memory."""
    assert like.tensor_meta is not None
    shape, step = like.tensor_meta.shape, 1
    stride = [0] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda d: (gradient.stride(d), -d)):
        stride[dim], step = step, step * shape[dim]
    return DTensorSpec(like.mesh, like.placements, TensorMeta(shape, tuple(stride), gradient.dtype))
