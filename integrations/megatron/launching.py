"""Brings the flags to a Megatron script that knows nothing of them.

Host seams (megatron-core 0.19.2): `training/arguments.py` `add_megatron_arguments` and
`validate_args`; `training/models/gpt.py` `GPTModelBuilder.build_distributed_models`, whose official
`pre_wrap_hooks` (`training/models/base.py`) get one hook more.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import megatron.core

from dynaflow_train.errors import UnsupportedError

from . import arguments, verifying
from .compiling import compile
from .seams import Applied
from .seams import apply as apply_seams
from .versions import check_version

if TYPE_CHECKING:
    import torch

    from dynaflow_train.config import Recipe

OLDEST_PYTHON = (3, 12)


def apply() -> Applied:
    """Give every Megatron script that runs from now on the --dynaflow flags.

    In a script of one's own, before Megatron parses:
    `from dynaflow_train.integrations.megatron import launching; launching.apply()`.

    Returns:
        what takes it back; it warns where flags were given and no model was built with them.

    Raises:
        UnsupportedError: megatron-core is of a version that is not known, or megatron.training
            cannot be imported.
    """
    check_version()
    host_arguments, host_gpt = (_training(name) for name in ("arguments", "models.gpt"))
    launch = _Launch()
    add, validate = host_arguments.add_megatron_arguments, host_arguments.validate_args
    builder = host_gpt.GPTModelBuilder
    build = builder.build_distributed_models

    @functools.wraps(add)
    def with_flags(parser: Any) -> Any:
        return arguments.add(add(parser))

    @functools.wraps(validate)
    def validated(args: Any, *rest: Any, **kwargs: Any) -> Any:
        launch.begin(args)
        return validate(args, *rest, **kwargs)

    @functools.wraps(build)
    def with_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self._model_config.pre_wrap_hooks
        if launch.recipe is not None and launch.hook not in hooks:
            hooks.append(launch.hook)
        return build(self, *args, **kwargs)

    host_arguments.add_megatron_arguments = with_flags
    host_arguments.validate_args = validated
    builder.build_distributed_models = with_hook
    applied = Applied()
    applied.callback(setattr, host_arguments, "add_megatron_arguments", add)
    applied.callback(setattr, host_arguments, "validate_args", validate)
    applied.callback(setattr, builder, "build_distributed_models", build)
    applied.callback(launch.end)
    return applied


def _training(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.training.{name}")
    except ImportError as error:
        found = ".".join(map(str, sys.version_info[:3]))
        raise UnsupportedError(
            f"megatron.training {megatron.core.__version__} cannot be imported ({error}); it needs "
            f"Python >= {'.'.join(map(str, OLDEST_PYTHON))}, this is {found}"
        ) from error


class _Launch:
    """What one script came to: its recipe, its replacements, the models compiled."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.seams = Applied()
        self.compiled = 0
        self.fused = False

    def begin(self, args: Any) -> None:
        """Read the flags; put the replacements in place before a model is built."""
        self.recipe = arguments.recipe_of(args)
        if self.recipe is not None:
            self.fused = args.gradient_accumulation_fusion
            arguments.check(args, self.recipe)
            self.seams.close()
            self.seams.callback(apply_seams())

    def hook(self, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Compile each stage of the pipeline on this rank."""
        assert self.recipe is not None, "without a recipe there is no hook"
        for stage in stages:
            compile(stage, self.recipe, into_main_grad=self.fused)
            if self.recipe.verify:
                verifying.watch(stage)
            self.compiled += 1
        return stages

    def end(self) -> None:
        """Take the replacements out."""
        self.seams.close()
        if self.recipe is not None and not self.compiled:
            warnings.warn(
                f"the script built no model with megatron.training's GPTModelBuilder, so strategy "
                f"{self.recipe.strategy!r} was not applied: call "
                "dynaflow_train.integrations.megatron.compile(model, recipe) in it",
                stacklevel=2,
            )
