"""Gradients of parameters that are added where the host collects them, and pass by autograd.

A wgrad's product is then the addition, too: nothing is rounded, kept or read between the two. The
host says where (Megatron's `main_grad`, say) and what autograd is told in place of a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, fx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Totals(Protocol):
    """Where a host collects gradients."""

    def find(self, parameter: Tensor) -> Tensor | None:
        """What the parameter's gradient is added to; None leaves it to autograd."""
        ...

    def added(self, parameter: Tensor) -> Tensor:
        """It has been added; gives what autograd gets for it."""
        ...


def parameters_of(
    outputs: Sequence[Any], parameters: Sequence[bool], inputs: Sequence[str], saved: Sequence[str]
) -> dict[int, int]:
    """Result of a backward -> place of its parameter among the saved values.

    Args:
        outputs: of the backward graph; gradients of the forward's inputs, one for one.
        parameters: for each of these inputs, whether it is one.
        inputs: names of the forward's inputs.
        saved: names of what the forward saves.
    """
    if not len(outputs) == len(parameters) == len(inputs):
        return {}
    found: dict[int, int] = {}
    for index, (output, is_one, name) in enumerate(zip(outputs, parameters, inputs, strict=True)):
        made = isinstance(output, fx.Node) and output.op == "call_function"
        if is_one and made and len(output.users) == 1 and outputs.count(output) == 1:
            found |= {index: saved.index(name)} if name in saved else {}
    return found


@dataclass
class Collected:
    """A backward whose results partly are added to totals.

    Attributes:
        runner: takes the totals behind its arguments.
        places: result -> place of its parameter among the arguments.
        totals: gives the host's, which may come and go.
    """

    runner: Callable[[list[Any]], list[Any]]
    places: Mapping[int, int]
    totals: Callable[[], Totals | None]
    _boxed_call: bool = True

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run one call; `arguments` is emptied."""
        host = self.totals()
        owners = [arguments[place] for place in self.places.values()]
        found = [host.find(owner) if host is not None else None for owner in owners]
        given = [*arguments, *found]
        arguments.clear()
        results = list(self.runner(given))
        for index, owner, total in zip(self.places, owners, found, strict=True):
            if host is not None and total is not None:
                results[index] = host.added(owner)
        return results
