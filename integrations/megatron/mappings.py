"""What Megatron's mappings send, as functional collectives.

Host seam (megatron-core 0.19.2): `core/tensor_parallel/mappings.py` `_reduce`,
`_gather_along_first_dim`, `_reduce_scatter_along_first_dim`, `_gather_along_last_dim`, which its
autograd.Functions call in both directions; `get_tensor_model_parallel_group_if_none` there, which
warns on rank 0 only, so that ranks would trace different graphs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.functions import all_gather, all_reduce, reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _even(sizes: Any) -> None:
    if sizes is not None:
        raise UnsupportedError(
            f"a captured layer exchanges equal parts of the sequence, this one asks for {sizes}"
        )


def _reduce(x: Tensor, group: Any) -> Tensor:
    return x if group.size() == 1 else all_reduce(x, group.group_name)


def _gather_first(x: Tensor, group: Any, sizes: Any = None, *_: Any, **__: Any) -> Tensor:
    _even(sizes)
    return x if group.size() == 1 else all_gather(x, group.size(), group.group_name)


def _scatter_first(x: Tensor, group: Any, sizes: Any = None, *_: Any, **__: Any) -> Tensor:
    _even(sizes)
    return x if group.size() == 1 else reduce_scatter(x, group.size(), group.group_name)


def _gather_last(x: Tensor, group: Any) -> Tensor:
    if group.size() == 1:
        return x
    whole = all_gather(x, group.size(), group.group_name)
    return torch.cat(whole.chunk(group.size(), dim=0), dim=-1)


OURS: Mapping[str, Callable[..., Tensor]] = {
    "_reduce": _reduce,
    "_gather_along_first_dim": _gather_first,
    "_reduce_scatter_along_first_dim": _scatter_first,
    "_gather_along_last_dim": _gather_last,
}


def when_traced(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` in a capture, `plain` everywhere else."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if torch.compiler.is_compiling() else plain)(*args, **kwargs)

    return call
