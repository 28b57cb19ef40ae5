"""Works around torch 2.11's silently wrong gradients of compiled autograd.Functions.

A Function whose forward writes in place into what it returns (every mapping of Megatron-core, every
collective) gets a zero gradient, without a graph break (pytorch#180642, mended by #180921 in 2.12).
Dynamo then returns one tensor both as output and as intermediate of the traced body. Asking it to
leave aliased intermediates out, as 2.12 does, cures it. Goes when torch 2.11 does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.variables.higher_order_ops as higher_order_ops
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_NAME = "collect_intermediate_outputs"


def is_affected(version: str = torch.__version__) -> bool:
    """Whether this torch has the bug."""
    return version.startswith("2.11.")


def is_corrected() -> bool:
    """Whether Dynamo is patched at the moment."""
    return getattr(getattr(higher_order_ops, _NAME, None), "_dynaflow", False)


def install_correction() -> Callable[[], None]:
    """Correct Dynamo, where there is something to correct; returns what undoes it."""
    if not is_affected() or is_corrected():
        return lambda: None
    original = getattr(higher_order_ops, _NAME)

    def corrected(tx: Any, subtracer: Any, outputs: Any, *_: Any, **__: Any) -> Any:
        return original(tx, subtracer, outputs, True)

    corrected._dynaflow = True  # type: ignore[attr-defined]
    setattr(higher_order_ops, _NAME, corrected)
    return lambda: setattr(higher_order_ops, _NAME, original)


@contextlib.contextmanager
def correct_gradients() -> Generator[None]:
    """Within it Dynamo traces autograd.Functions rightly; undone at exit."""
    undo = install_correction()
    try:
        yield
    finally:
        undo()


def needs_correction(gm: fx.GraphModule) -> bool:
    """Whether the graph holds an autograd.Function that was traced with the bug."""
    if not is_affected() or is_corrected():
        return False
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any("autograd_function_apply" in str(n.target) for g in graphs for n in g.nodes)
