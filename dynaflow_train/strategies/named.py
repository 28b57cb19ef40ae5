"""Strategies by name: what a recipe or a list of candidates says, checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import yaml

from dynaflow_train.config import nearest
from dynaflow_train.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynaflow_train.strategy import Strategy


def make(known: Sequence[type[Strategy]], name: str, parameters: Mapping[str, object]) -> Strategy:
    """The strategy called `name` among `known`, with `parameters` as its fields.

    Raises:
        RecipeError: no such strategy or parameter, with the nearest that exists; or a value of
            another type than the default's.
    """
    by_name = {strategy.name: strategy for strategy in known}
    if name not in by_name:
        raise RecipeError(f"no strategy {name!r}. {nearest(name, by_name)}")
    strategy = by_name[name]
    defaults = {each.name: each.default for each in dataclasses.fields(strategy)}
    fields: dict[str, object] = {}
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
        fields[key] = given
    made = strategy(**fields)
    if made.most_micro_batches is not None and made.most_micro_batches < 1:
        raise RecipeError(
            f"strategy {name!r} needs at least 1 micro-batch, got {dict(parameters)}."
        )
    return made


def parse(known: Sequence[type[Strategy]], text: str) -> Strategy:
    """One line, such as `dual_batch micro_batches=4 merge_wgrads=true`; values are YAML.

    Raises:
        RecipeError: as `make`, or a word that is no `key=value`.
    """
    name, *words = text.split() or [""]
    parameters: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RecipeError(f"candidate {text!r}: {word!r} is no parameter=value, without spaces")
        try:
            parameters[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise RecipeError(f"candidate {text!r}: {value!r} is not YAML: {error}") from error
    return make(known, name, parameters)
