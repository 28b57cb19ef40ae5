"""Installs the traceable replacements in megatron-core, and takes them out again.

One table names every place that is touched. Outside a capture each replacement calls what it
replaced, except the fused attention and the norm's permission, which are wanted everywhere.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Self

import megatron.core.distributed.distributed_data_parallel as host_ddp
import megatron.core.tensor_parallel.layers as host_layers
import megatron.core.tensor_parallel.mappings as host_mappings
import megatron.core.transformer.dot_product_attention as host_attention
import megatron.core.transformer.moe.moe_layer as host_moe
import megatron.core.transformer.moe.moe_logging as host_logging
import megatron.core.transformer.moe.moe_utils as host_moe_utils
import megatron.core.transformer.torch_norm as host_norm

from dynaflow_train.errors import UnsupportedError

from . import attention, linear, mappings, moe, norm, param_gather
from .versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "_dynaflow_replaces"


class Applied(contextlib.ExitStack):
    """Replacements in place: call it, or leave its `with` block, to undo them."""

    def __call__(self) -> None:
        """Everything as it was before `apply`."""
        self.close()

    def __enter__(self) -> Self:
        return self


def apply(*, attention_kind: attention.Kind = "sdpa", regather: bool = True) -> Applied:
    """Make Megatron's layers traceable, for models built before and after.

    Sequence parallelism without TransformerEngine needs it before the model is built.

    Args:
        attention_kind: "sdpa", torch's fused attention; "host", the host's unfused sums.
        regather: under sequence parallelism gather a linear's input again in the backward, as the
            host does; False keeps it whole: one all-gather less, more memory.

    Raises:
        UnsupportedError: a megatron-core that is not known, or the replacements are in place.
    """
    check_version()
    if hasattr(host_layers.linear_with_frozen_weight, _MARK):
        raise UnsupportedError("dynaflow_train's replacements are in Megatron already: undo first")
    linears = functools.partial(linear.replacement, regather=regather)
    seams: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (host_layers, "linear_with_grad_accumulation_and_async_allreduce", linears),
        (host_layers, "linear_with_frozen_weight", linears),
        (host_norm.WrappedTorchNorm, "__new__", norm.replacement),
        (
            host_attention.DotProductAttention,
            "forward",
            functools.partial(attention.replacement, kind=attention_kind),
        ),
        (host_ddp.DistributedDataParallel, "_make_forward_pre_hook", param_gather.replacement),
        (host_moe.MoELayer, "forward", moe.replacement),
        (host_moe_utils.MoEAuxLossAutoScaler, "backward", moe.scaled),
        (host_logging.MoEMetricsTracker, "record", moe.recorded),
        *(
            (host_mappings, name, functools.partial(mappings.when_traced, ours=ours))
            for name, ours in mappings.OURS.items()
        ),
    ]
    applied = Applied()
    with contextlib.ExitStack() as failing:
        failing.callback(applied.close)
        for define in (attention.define_dropout, moe.define_scale):
            applied.callback(define()._destroy)
        for owner, name, make in seams:
            plain = owner.__dict__[name]
            ours = make(plain.__func__ if isinstance(plain, staticmethod) else plain)
            setattr(ours, _MARK, name)
            setattr(owner, name, ours)
            applied.callback(setattr, owner, name, plain)
        failing.pop_all()
    return applied
