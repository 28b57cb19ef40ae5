"""Trains a Llama of 8B's width, byte by byte, on the source of Python's standard library.

A transformers script that knows nothing of tensor parallelism or of dynaflow_train: the launcher
brings both. `start.py` beside it runs the same training in other ways, `run.py` all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from recipes.demo import train as demo
from recipes.end_to_end.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, TrainerCallback

MODELS = ("wide", "demo")
DTYPES = ("bf16", "mixed", "fp32")  # weights in bf16; fp32 under bf16 autocast; fp32


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed, or `words`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--model", choices=MODELS, default="wide", help="the demo's, or one of 8B's proportions")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=2, help="samples a step")
    add("--parts", type=int, default=1, help="micro-steps that accumulate their gradients")
    add("--length", type=int, default=4096)
    add("--hidden", type=int, default=4096)
    add("--layers", type=int, default=8)
    add("--rate", type=float, default=1e-4, help="the learning rate")
    add("--look-every", type=int, default=50, help="steps between two looks at the memory")
    return parser.parse_args(words)


def wide(hidden: int, layers: int, length: int) -> LlamaConfig:
    """Llama 8B's proportions: at 4096, 32 heads, 8 of keys and values, FFN 14336."""
    heads = max(4, hidden // 128)
    return LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 4),
        max_position_embeddings=length,
        use_cache=False,
    )


def build(given: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The model, made where it will train; equal on every rank, by the seed."""
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        if given.model == "demo":
            return demo.build_model(given.hidden, given.layers, given.length).to(dtype)
        config = wide(given.hidden, given.layers, given.length)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def data(given: argparse.Namespace) -> Subset:
    """Whole batches only: every step has the same shape, and accumulated parts never straddle."""
    source = demo.PythonSource(given.length)
    return Subset(source, range(len(source) // given.batch * given.batch))


def train(given: argparse.Namespace, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """The training, watched."""
    if given.batch % given.parts:
        raise SystemExit(f"--batch {given.batch} does not divide into --parts {given.parts}")
    given.output.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(given.output),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch // given.parts,
        gradient_accumulation_steps=given.parts,
        learning_rate=given.rate,
        warmup_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=cuda,
        bf16=given.dtype == "mixed",
        use_cpu=not cuda,
    )
    watch = Watch(given.output, given.batch * given.length, given.look_every)
    trainer = Trainer(
        model=build(given, args.device),
        train_dataset=data(given),
        args=args,
        callbacks=[watch, *callbacks],
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    train(arguments())
