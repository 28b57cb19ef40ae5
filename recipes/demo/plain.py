"""train.py with the recipe's tensor parallelism and nothing else: the run to compare with."""

from __future__ import annotations

import runpy
from pathlib import Path

from dynaflow_train.config import Recipe
from dynaflow_train.integrations.hf import launching

if __name__ == "__main__":
    here = Path(__file__).parent
    undo = launching.apply(Recipe.load(here / "recipe.yaml"), schedule=False)
    runpy.run_path(str(here / "train.py"), run_name="__main__")
    undo()
