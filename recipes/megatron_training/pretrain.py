"""What Megatron-LM's `pretrain_gpt.py` does, at its smallest: `megatron.training` on mock data.

    torchrun --nproc-per-node 2 -m dynaflow_train.launch --megatron \
        recipes/megatron_training/pretrain.py <Megatron's flags> [--dynaflow-...]

A sample counts up modulo the vocabulary from a random token by a random step: there is something to
learn, and nothing to download.
"""

from collections.abc import Iterator
from typing import Any

import megatron.core.datasets.utils
import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Counting(torch.utils.data.Dataset):
    """`samples` sequences of `tokens` + 1 tokens each; the same numbers give the same sequences."""

    def __init__(self, samples: int, tokens: int, vocabulary: int) -> None:
        self.samples, self.tokens, self.vocabulary = samples, tokens, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        first, step = torch.randint(1, self.vocabulary, (2,), generator=draw)
        return {"text": (first + step * torch.arange(self.tokens + 1)) % self.vocabulary}


def datasets(samples: list[int]) -> list[Counting | None]:
    """For training, validation and test."""
    args = get_args()
    return [Counting(n, args.seq_length, args.vocab_size) if n else None for n in samples]


datasets.is_distributed = True  # every rank reads for itself


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens, and both for Megatron's log."""
    loss = output.float().sum()
    number = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    return loss, number, {"lm loss": torch.stack([loss.detach(), number.float()])}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """One of Megatron's micro-batches."""
    device = next(model.parameters()).device
    text = next(batches)["text"].to(device, non_blocking=True)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=device)[None].expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_of


if __name__ == "__main__":
    # Megatron runs `make` for its index builder; the wheel has it compiled and brings no Makefile.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
