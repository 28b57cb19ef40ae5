"""Trains a small Llama, byte by byte, on the source of Python's standard library.

A plain transformers script: it knows nothing of tensor parallelism or of dynaflow_train.

    python train.py          # one process; run.py starts two, with the recipe beside this file
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback


class PythonSource(Dataset):
    """Windows of `length` bytes from the standard library's files, one token a byte."""

    def __init__(self, length: int, most_bytes: int = 8_000_000) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
        self.tokens = torch.frombuffer(text[:most_bytes], dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": window, "labels": window}


class Bar(TrainerCallback):
    """One progress bar with loss and tokens per second."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar: Any = None
        self.last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw it on rank 0."""
        self.bar = tqdm(total=state.max_steps, unit="step", disable=not state.is_world_process_zero)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.last = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Advance it."""
        if "loss" in logs:
            speed = self.tokens_per_step / (time.perf_counter() - self.last)
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", tokens_per_s=f"{speed:,.0f}")
            self.bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave it."""
        self.bar.close()


def build_model(hidden: int, layers: int, length: int) -> LlamaForCausalLM:
    """A Llama over bytes; equal on every rank, by the seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=length,
        )
    )


def main() -> None:
    """Trains, and writes losses and times into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo_out"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()

    trainer = Trainer(
        model=build_model(args.hidden, args.layers, args.length),
        train_dataset=PythonSource(args.length),
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=1e-3,
            warmup_steps=5,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            seed=0,
        ),
        callbacks=[Bar(args.batch * args.length)],
    )
    trainer.pop_callback(PrinterCallback)
    with logging_redirect_tqdm():  # messages above the bar, not in it
        trainer.train()
    if trainer.is_world_process_zero():
        log = json.dumps(trainer.state.log_history, indent=1)
        (args.output / "log.json").write_text(log)


if __name__ == "__main__":
    main()
