"""Norms of torch under sequence parallelism, without TransformerEngine or Apex.

Host seam (megatron-core 0.19.2): `core/transformer/torch_norm.py` `WrappedTorchNorm.__new__`, which
refuses `sequence_parallel`. The norms compute as before; their weights are marked, so that
`core/distributed/finalize_model_grads.py` sums their gradients over the tensor-parallel group.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def replacement(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The host's `__new__`, which takes `sequence_parallel` too."""

    @functools.wraps(plain)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = plain(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new
