"""Lets megatron-core run on CPU and gloo: what it asks of torch.cuda, nothing of the product."""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or an event: everything is in order already."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def install() -> None:
    """For the rest of this process."""
    warnings.filterwarnings("ignore", message=".*tp_group is None.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    nothing = _Nothing()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = lambda *args, **kwargs: nothing  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *args, **kwargs: nothing  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=9, minor=0, name="none", gcnArchName="none"
    )  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args, **kwargs: None  # type: ignore[assignment]


def sizes_on_the_host() -> None:
    """Megatron's dispatcher wants numpy's arrays of sizes, and makes them of CUDA tensors only."""
    from megatron.core.transformer.moe import token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


class TorchOnCpu:
    """torch, for Megatron's pipeline schedules: its zeros are on the CPU, not on CUDA.

    `schedules.torch = TorchOnCpu()`: a mode would be seen by Dynamo.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        del device
        return torch.zeros(*args, **kwargs)


class SaysCuda(TorchFunctionMode):
    """What Megatron's optimizers ask for on CUDA, they get on the CPU, and take it for CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        asked = func is torch.Tensor.type and len(args) == 1
        return result.replace("torch.", "torch.cuda.") if asked else result
