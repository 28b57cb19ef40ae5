"""Runs a recipe inside transformers' Trainer: in place, from the first step to the last.

Host seam: `transformers/trainer_callback.py` `TrainerCallback` (5.17 to 5.x). `on_train_begin`
comes after accelerate has prepared the model, whose object cannot be replaced there.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from transformers import TrainerCallback

from dynaflow_train import api

logger = logging.getLogger(__name__)


class DynaFlowCallback(TrainerCallback):
    """Compiles the model's regions at the start of training and restores them at its end.

    Evaluation and generation run the host's plain forward. Adds `tokens_per_second` and
    `hidden_share` (of communication time, 0 to 1) to the logs.

    Args:
        recipe: a Recipe, the path or the text of one, a strategy or the name of one.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
