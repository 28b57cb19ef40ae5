"""Models that are called within a context, and the context in which collectives are removed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

    from torch import Tensor


class Within(torch.nn.Module):
    """A model that is called within a context: Dynamo looks at what is in place at every call."""

    def __init__(self, model: torch.nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, inputs_embeds: Tensor) -> Any:
        """The model's."""
        with self.context():
            return self.model(inputs_embeds=inputs_embeds)


def _itself(x: Tensor, group: str) -> Tensor:
    del group
    return x


def _repeated(x: Tensor, size: int, group: str) -> Tensor:
    del group
    return torch.cat([x] * size)


def _part(x: Tensor, size: int, group: str) -> Tensor:
    del group
    return x[: x.shape[0] // size]


@contextlib.contextmanager
def removed(*modules: ModuleType) -> Generator[None]:
    """Collectives of `integrations.functions`, as these modules name them, done without others.

    A sum is the rank's own summand, a gathered sequence its own part repeated.
    """
    stands = {"all_reduce": _itself, "all_gather": _repeated, "reduce_scatter": _part}
    places = [(module, name) for module in modules for name in stands]
    plain = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, stands[name])
        yield
    finally:
        for (module, name), function in zip(places, plain, strict=True):
            setattr(module, name, function)
