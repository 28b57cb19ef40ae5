"""Hooks that wait for a layer's parameters run at the region's entry, not inside the capture.

Host seam (megatron-core 0.19.2): `core/distributed/distributed_data_parallel.py`
`DistributedDataParallel._make_forward_pre_hook` (`--overlap-param-gather`): a pre-hook on every
module, which waits for the all-gather of its bucket and starts the next one's.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HOISTED = "_dynaflow_hoisted"


def replacement(plain: Callable[[Any], Callable[..., None]]) -> Callable[[Any], Any]:
    """The host's maker of hooks, whose hooks do nothing in a capture."""

    @functools.wraps(plain)
    def make(self: Any) -> Callable[..., None]:
        hook = plain(self)

        def quiet(module: torch.nn.Module, *unused: Any) -> None:
            if not torch.compiler.is_compiling():
                hook(module, *unused)

        setattr(quiet, _HOISTED, True)
        return quiet

    return make


def wait_for(modules: Sequence[torch.nn.Module]) -> None:
    """Run the hoisted hooks of all modules in the regions, in the order of registration."""
    for region in modules:
        for module in region.modules():
            for hook in tuple(module._forward_pre_hooks.values()):
                if hasattr(hook, _HOISTED):
                    hook(module, ())
