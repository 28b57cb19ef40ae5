"""Keeps activation checkpointing around compiled layers.

Up to 5.17 a layer's `__call__` checkpoints, outside of what is compiled. Later its `forward` does:
the graph would hold the recomputation, and random states with it. There the checkpoint moves out.

Host seam: `transformers/modeling_layers.py` `GradientCheckpointingLayer` (5.17 to 5.x).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from transformers.modeling_layers import GradientCheckpointingLayer

from dynaflow_train.dispatch import Dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def hoist(model: nn.Module) -> Callable[[], None]:
    """Move the checkpoint of every compiled layer out of it, in place; the result undoes that.

    Args:
        model: compiled layer by layer; checkpointing is switched on or off already.
    """
    undos = [
        _hoist(layer, dispatcher)
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        if isinstance(dispatcher := layer._compiled_call_impl, Dispatcher)
    ]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _hoist(layer: GradientCheckpointingLayer, dispatcher: Dispatcher) -> Callable[[], None]:
    if "__call__" in vars(GradientCheckpointingLayer):
        return lambda: None
    plain = dispatcher.run
    checkpoint: Any = layer._gradient_checkpointing_func

    def without(*args: Any, **kwargs: Any) -> Any:
        layer.gradient_checkpointing = False
        try:
            return plain(*args, **kwargs)
        finally:
            layer.gradient_checkpointing = True

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(without, **kwargs), *args)

    def undo() -> None:
        del dispatcher.run

    dispatcher.run = run
    return undo
