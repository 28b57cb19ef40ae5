"""A Trainer over a tiny model and fixed tokens, on the CPU."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests.hf.models import tokens


class Tokens(Dataset):
    """The same 32 sequences for everybody."""

    def __init__(self, length: int = 12) -> None:
        self.rows = tokens(7, 32, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(model: PreTrainedModel, folder: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    """Four steps of four sequences; each step is logged."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=list(callbacks),
    )


def losses(of: Trainer) -> list[float]:
    """The logged training losses."""
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def tensor_parallel_environment(size: int) -> None:
    """What `accelerate launch` exports for a group of CPU processes."""
    os.environ.update(
        ACCELERATE_USE_CPU="1",
        PARALLELISM_CONFIG_TP_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
    )
