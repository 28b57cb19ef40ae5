"""The strategies that come with dynaflow_train, by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from dynaflow_train.config import nearest
from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies.comm_overlap import CommOverlap
from dynaflow_train.strategies.dual_batch import DualBatch
from dynaflow_train.strategies.nanoflow import NanoFlow
from dynaflow_train.strategies.sequential import Sequential

if TYPE_CHECKING:
    from dynaflow_train.strategy import Strategy

BUILT_IN: tuple[type[Strategy], ...] = (Sequential, CommOverlap, DualBatch, NanoFlow)


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(strategy.name for strategy in BUILT_IN)


def get(name: str, /, **parameters: object) -> Strategy:
    """The strategy called `name`.

    Args:
        name: one of `names()`.
        **parameters: its fields; lists are taken as tuples, as YAML has no tuples.

    Raises:
        RecipeError: no such strategy or parameter, with the nearest that exists; or a value of
            another type than the default's.
    """
    known = {strategy.name: strategy for strategy in BUILT_IN}
    if name not in known:
        raise RecipeError(f"no strategy {name!r}. {nearest(name, known)}")
    strategy = known[name]
    defaults = {each.name: each.default for each in dataclasses.fields(strategy)}
    for key, value in parameters.items():
        if key not in defaults:
            raise RecipeError(
                f"strategy {name!r} has no parameter {key!r}. {nearest(key, defaults)}"
            )
        given: object = value
        if isinstance(value, list):
            given = tuple(cast("list[object]", value))
        if type(given) is not type(defaults[key]):
            raise RecipeError(
                f"strategy {name!r} takes {key} as {type(defaults[key]).__name__} (default "
                f"{defaults[key]!r}), got {given!r} ({type(given).__name__})."
            )
        parameters[key] = given
    return strategy(**parameters)
