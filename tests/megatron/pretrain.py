"""Does what Megatron-LM's pretrain_gpt.py does until `pretrain`, which asserts a GPU; then trains.

`MEGATRON_TEST_OUT` is the file that it writes: what became of its model, and its losses.
"""

import json
import os
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args

import dynaflow_train as df


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    torch.manual_seed(1)
    config = gpt_config_from_args(args)
    (model,) = config.get_builder_cls()(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        DistributedDataParallelConfig(overlap_grad_reduce=True),
    )
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        size = (args.micro_batch_size, args.seq_length)
        tokens = torch.randint(0, 64, size)
        model.zero_grad_buffer()
        positions = torch.arange(size[1])[None].expand(*size)
        mask = torch.ones(1, 1, size[1], size[1]).triu(1).bool()
        if not args.create_attention_mask_in_dataloader:
            mask = None
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        model.finish_grad_sync()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.main_grad
        losses.append(loss.item())
    used = df.plans(model.module)
    found = {
        "losses": losses,
        "plans": sorted({f"{u.plan.strategy} {u.region.phase} {len(u.plan.sizes)}" for u in used}),
        "added_to_main_grad": sum(p.grad_added_to_main_grad for p in model.parameters()),
        "sequence_parallel": config.transformer.sequence_parallel,
    }
    Path(os.environ["MEGATRON_TEST_OUT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
