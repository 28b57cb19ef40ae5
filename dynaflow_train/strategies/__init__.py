"""The strategies that come with dynaflow_train, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynaflow_train.config import Recipe
from dynaflow_train.errors import RecipeError
from dynaflow_train.strategies.auto import CANDIDATES, Auto
from dynaflow_train.strategies.named import make

if TYPE_CHECKING:
    from pathlib import Path

    from dynaflow_train.strategy import Strategy

BUILT_IN: tuple[type[Strategy], ...] = (*CANDIDATES, Auto)


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
    return make(BUILT_IN, name, parameters)


def load(path: str | Path) -> tuple[Recipe, Strategy]:
    """The recipe in a file, and the strategy that it names with its parameters.

    Raises:
        RecipeError: anything in it is wrong; names the file.
    """
    recipe = Recipe.load(path)
    try:
        return recipe, get(recipe.strategy, **recipe.parameters)
    except RecipeError as error:
        raise RecipeError(f"recipe {path}: {error}") from error
