"""Compiles a Megatron model in regions: checked, replacements in place, hooks at the entry."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dynaflow_train.api as api
from dynaflow_train.config import Recipe
from dynaflow_train.dispatch import groups_of
from dynaflow_train.errors import RecipeError

from . import moe, param_gather
from .main_grad import MainGrads
from .versions import check_model, check_recomputation

if TYPE_CHECKING:
    import torch

BATCH_DIM = 1  # Megatron's activations are [s, b, h]


def compile(
    model: torch.nn.Module, what: api.What, *, into_main_grad: bool | None = None, **options: Any
) -> torch.nn.Module:
    """As `dynaflow_train.compile`, for a model of megatron-core; `seams.apply` comes first.

    Args:
        model: holds transformer layers (GPTModel, or a wrapper around one). Compile it before
            DistributedDataParallel wraps it.
        what: the name of a strategy, a Strategy, a Recipe, or the path of one.
        into_main_grad: add wgrads to `main_grad` as they are computed (`main_grad.MainGrads`);
            None: as the model's `gradient_accumulation_fusion` says.
        **options: keys of a recipe and parameters of the strategy, where `what` is a name.

    Raises:
        UnsupportedError: see `versions.check_model` and `versions.check_recomputation`.
        RecipeError: `batch_dim` is not 1, or as `dynaflow_train.compile`.
    """
    _, layers = api.layers_of(model)
    check_model(model, layers)
    whole = isinstance(what, Recipe | Path) or str(what).endswith((".yaml", ".yml"))
    given = options if whole else {"batch_dim": BATCH_DIM, **options}
    recipe, _ = api.resolve(what, given)
    if recipe.batch_dim != BATCH_DIM:
        raise RecipeError(
            f"Megatron's activations are [s, b, h]: the recipe needs batch_dim: {BATCH_DIM}, "
            f"found {recipe.batch_dim}"
        )
    check_recomputation(layers[0].config, recipe.region)
    api.compile(model, what, **given)
    config: Any = layers[0].config
    fused = config.gradient_accumulation_fusion if into_main_grad is None else into_main_grad
    for session in api.sessions(model):
        session.totals = MainGrads(enabled=bool(fused))
    moe.number_layers(layers)
    size = recipe.layers_per_region if recipe.region == "model" else 1
    for region in groups_of(layers, size):
        dispatcher: Any = region[0]._compiled_call_impl
        dispatcher.before_run.append(functools.partial(param_gather.wait_for, region))
        dispatcher.before_run.append(functools.partial(moe.prepare, moe.routers_of(region)))
    return model


undo = api.undo
