"""train.py with the recipe's tensor parallelism, and not by the launcher.

start.py plain ...          # the layers as they are: the run to compare with
start.py compile ...        # torch.compile for each layer, what a user has today
start.py callback ...       # Trainer(callbacks=[DynaFlowCallback(recipe)])
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dynaflow_train import api
from dynaflow_train.config import Recipe
from dynaflow_train.integrations.hf import launching
from dynaflow_train.integrations.hf.callback import DynaFlowCallback
from recipes.end_to_end import train


class CompileLayers(TrainerCallback):
    """torch.compile for each decoder layer, once the Trainer has prepared the model."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Nothing compiles before the first step."""
        for layer in api.layers_of(model)[1]:
            layer.compile(backend=self.backend)


def main() -> None:
    """Command line: a mode, then train.py's own arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("plain", "compile", "callback"))
    parser.add_argument("--recipe", type=Path, required=True)
    given, rest = parser.parse_known_args()
    recipe = Recipe.load(given.recipe)
    callbacks: list[TrainerCallback] = []
    if given.mode == "compile":
        callbacks = [CompileLayers("inductor" if recipe.executor == "inductor" else "aot_eager")]
    elif given.mode == "callback":
        callbacks = [DynaFlowCallback(recipe, write=True)]
    undo = launching.apply(recipe, schedule=False)
    try:
        train.train(train.arguments(rest), callbacks)
    finally:
        undo()


if __name__ == "__main__":
    main()
