"""Runs a recipe inside transformers' Trainer: in place, from the first step to the last.

Host seam: `transformers/trainer_callback.py` `TrainerCallback` (5.17 to 5.x). `on_train_begin`
comes after accelerate has prepared the model, whose object cannot be replaced there.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from dynaflow_train import api

from . import checkpointing, report, tensor_parallel

logger = logging.getLogger(__name__)


class DynaFlowCallback(TrainerCallback):
    """Compiles the model's regions at the start of training and restores them at its end.

    Evaluation and generation run the host's plain forward. Adds to the logs `tokens_per_second`,
    over all ranks, and `hidden_share`, of the communication time, 0 to 1.

    Args:
        recipe: a Recipe, the path of one, a strategy or the name of one.
        write: at the end write `plan.txt`, `trace.json`, `timeline.png` (with matplotlib) and
            `report.json` into the folder `dynaflow` of the Trainer's output; with the recipe's
            `verify` the report holds the worst gradient error of the last batch.
        **options: keys of a recipe, as for `dynaflow_train.compile`.

    Raises:
        RecipeError: the recipe cannot be read, or is wrong.
    """

    def __init__(self, recipe: Any, *, write: bool = False, **options: Any) -> None:
        api.resolve(recipe, options)  # wrong ones are told here, not when the model is loaded
        self.recipe, self.options, self.write = recipe, options, write
        self._meter = _Meter()
        self._told, self._breaks = False, 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Compile in place; the first step captures.

        Raises:
            UnsupportedError: the model is sharded with a plan whose gradients are wrong.
            RecipeError, RuleError: see `dynaflow_train.compile`.
        """
        del args, control, kwargs
        tensor_parallel.check_host_plan(model)
        api.compile(model, self.recipe, **self.options)
        checkpointing.hoist(model)
        self._meter = _Meter()
        self._meter.attach(model)
        self._told, self._breaks = not state.is_world_process_zero, report.graph_breaks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of a step."""
        del args, state, control, kwargs
        self._meter.start()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Stop it; after the first step say what was captured."""
        del args, state, control, kwargs
        self._meter.stop()
        if not self._told:
            self._told = True
            breaks = report.graph_breaks() - self._breaks
            logger.warning("%s", report.captured(model, breaks))  # a level that users see

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add our numbers to the logs of a training step, and to the Trainer's history of them."""
        del control, kwargs
        if logs is None or "loss" not in logs:
            return
        copies = args.world_size // (getattr(model, "_tp_size", None) or 1)
        logs["tokens_per_second"] = self._meter.rate() * copies
        logs["hidden_share"] = report.hidden_share(model)
        state.log_history[-1].update(logs)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Write the report, verified if the recipe says so, then give the model back."""
        del control, kwargs
        self._meter.detach()
        batch, facts = self._meter.batch, {}
        if batch is not None and any(s.recipe.verify for s in api.sessions(model)):
            facts = report.verified(model, batch)
        if self.write and state.is_world_process_zero:
            report.write(model, Path(args.output_dir) / "dynaflow", facts)
        api.undo(model)


class _Meter:
    """Counts tokens and seconds of training steps, and keeps the last batch."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.begun = 0, 0.0, 0.0
        self.batch: dict[str, Any] | None = None
        self.hook: Any = None

    def attach(self, model: nn.Module) -> None:
        self.hook = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def detach(self) -> None:
        if self.hook is not None:
            self.hook.remove()

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.batch = kwargs
            tokens = kwargs.get("input_ids", args[0] if args else None)
            self.tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0

    def start(self) -> None:
        self.begun = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.begun

    def rate(self) -> float:
        """Tokens per second of this rank since the last call."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate
