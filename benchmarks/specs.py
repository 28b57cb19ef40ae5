"""What stands behind `--strategies`: a line, and what it asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaflow_train.config import nearest
from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies import BUILT_IN
from dynaflow_train.strategies.named import parse
from dynaflow_train.strategies.sequential import Sequential
from dynaflow_train.strategy import COMM

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.strategy import Strategy

GRAPH, COPIES, TOGETHER = "+graph", "+copies", "split_wgrad=false"
RESERVE = "sm_reserve"
_OFF = {"copied": "direct", "recompiled": "reuse"}  # ending -> what of the op compiler it turns off


@dataclass(frozen=True)
class Spec:
    """A strategy, keys of a recipe beside it, and what of the op compiler is turned off."""

    strategy: Strategy
    options: dict[str, Any]
    off: tuple[str, ...] = ()

    @property
    def graph(self) -> bool:
        """Whether it is recorded as CUDA graphs."""
        return "cuda_graphs" in self.options


def read(line: str) -> Spec:
    """What a line asks for.

    Args:
        line: `name parameter=value ...`, then `+graph` for CUDA graphs, `+ctas=8` for as many
            thread blocks of a collective at most, `+copies` for the copy engine, `+copies=4` for as
            many `transfer_chunks`, `+layers=4` for as many `layers_per_region`, `+reserve=8` for as
            large an `sm_reserve` of experts' products, in any order.
            `split_wgrad=false` keeps the gradients of parameters in the ops of the activations'
            gradients. For an ablation: `+copied` copies micro-batches' results into shared buffers,
            `+recompiled` compiles equal ops anew.

    Raises:
        RecipeError: no such strategy, parameter or ending, with the nearest that exists.
    """
    text, *endings = line.split("+")
    strategy, options = _strategy(text, line), dict[str, Any]()
    off = tuple(_OFF[each.strip()] for each in endings if each.strip() in _OFF)
    endings = [each for each in endings if each.strip() not in _OFF]
    for ending in endings:
        name, equals, value = ending.strip().partition("=")
        if name not in _ENDINGS:
            known = nearest(name, [*_ENDINGS, *_OFF])
            raise RecipeError(f"{line!r}: no ending {'+' + name!r}. {known}")
        found = _ENDINGS[name](line, strategy, value if equals else None)
        if twice := set(found) & set(options):
            raise RecipeError(f"{line!r}: +{name} sets {twice.pop()} a second time; leave one out")
        options |= found
    return Spec(strategy, options, off)


def _graph(line: str, strategy: Strategy, value: str | None) -> dict[str, Any]:
    del strategy
    if value is not None:
        raise RecipeError(f"{line!r}: +graph takes no value, found {value!r}")
    return {"cuda_graphs": True}


def _ctas(line: str, strategy: Strategy, value: str | None) -> dict[str, Any]:
    if not (value and value.isdecimal() and int(value)):
        raise RecipeError(
            f"{line!r}: +ctas=N takes a whole number of at least 1, found {value or 'none'!r}"
        )
    if isinstance(strategy, Sequential):
        raise RecipeError(
            f"{line!r}: {strategy.name} has no stream for collectives whose ctas could be limited"
        )
    return {"nccl": {COMM: {"max_ctas": int(value)}}}  # the one lane that they all communicate on


def _copies(line: str, strategy: Strategy, value: str | None) -> dict[str, Any]:
    del strategy
    if value is None:
        return {"transfer": "copy_engine"}
    if not (value.isdecimal() and int(value)):
        raise RecipeError(f"{line!r}: +copies=N takes a number of chunks, found {value!r}")
    return {"transfer": "copy_engine", "transfer_chunks": int(value)}


def _layers(line: str, strategy: Strategy, value: str | None) -> dict[str, Any]:
    del strategy
    if not (value and value.isdecimal() and int(value)):
        found = value or "none"
        raise RecipeError(f"{line!r}: +layers=N takes a number of layers, found {found!r}")
    return {"layers_per_region": int(value)}


def _reserve(line: str, strategy: Strategy, value: str | None) -> dict[str, Any]:
    del strategy
    if not (value and value.isdecimal() and int(value)):
        raise RecipeError(f"{line!r}: +reserve=N takes a number of SMs, found {value or 'none'!r}")
    return {RESERVE: int(value)}


_ENDINGS: dict[str, Callable[[str, Strategy, str | None], dict[str, Any]]] = {
    "graph": _graph,
    "ctas": _ctas,
    "copies": _copies,
    "layers": _layers,
    "reserve": _reserve,
}


def _strategy(text: str, line: str) -> Strategy:
    words = text.split()
    together = TOGETHER in words
    strategy = parse(BUILT_IN, " ".join(word for word in words if word != TOGETHER))
    if not together:
        return strategy
    if len(strategy.alternatives) > 1:
        raise RecipeError(f"{line!r}: {TOGETHER} is a setting of one strategy, auto tries several")
    kind = type(strategy)
    plain = type(f"{kind.__name__}Together", (kind,), {"split_wgrad": False, "name": kind.name})
    return plain(**{f.name: getattr(strategy, f.name) for f in dataclasses.fields(kind)})
