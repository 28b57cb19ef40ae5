"""Two stages of a pipeline under Megatron's own 1F1B schedule, and recomputed layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.megatron.models import SEQUENCE, Case
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

MICRO_STEPS, STEPS, SIZE = 4, 2, 2
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# Strategy, region, wgrads straight into main_grad, Megatron's settings.
RUNS = [
    ("dual_batch", "model", True, {}),
    ("dual_batch", "layer", False, RECOMPUTED),
]


def stage(case: Case) -> Any:
    """This rank's part of the model, with the same parameters at every call."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.megatron import models

    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    return GPTModel(
        models.config(case),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=models.VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def train(model: Any) -> dict[str, Any]:
    """What a few steps of Megatron's schedule come to, and how many forwards were pending."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    from tests.megatron import cpu, models

    schedules.torch = cpu.TorchOnCpu()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # checkpoints
    random._set_cuda_rng_state = lambda *args, **kwargs: None

    config = model.config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True),
        model,
    )
    config.no_sync_func, config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    pending, most, losses = 0, 0, []

    def forwarded(*_: Any) -> None:
        nonlocal pending, most
        pending += 1
        most = max(most, pending)

    def left(gradient: Any) -> None:
        nonlocal pending
        pending -= 1

    def loss_of(output: Any) -> tuple[Any, dict[str, Any]]:
        loss = output.mean()
        return loss, {"loss": loss.detach()}

    def forward(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        output = model(**next(batches))
        forwarded()
        output.register_hook(left)
        return output, loss_of

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        found = schedules.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=(models.batch(10 * step + i, SIZE) for i in range(MICRO_STEPS)),
            model=[ddp],
            num_microbatches=MICRO_STEPS,
            seq_length=SEQUENCE,
            micro_batch_size=SIZE,
            forward_only=False,
        )
        losses += [each["loss"].item() for each in found]
    grads = {n: p.main_grad.clone() for n, p in model.named_parameters()}
    told = sum(p.grad_added_to_main_grad for p in model.parameters())
    return {"losses": losses, "main_grad": grads, "most": most, "told": told}


def with_and_without(rank: int) -> list[Any]:
    del rank
    import dynaflow_train as df
    from dynaflow_train.integrations import megatron
    from tests.engine.stepping import Result
    from tests.megatron import models

    more = {"deallocate_pipeline_outputs": True, "pipeline_dtype": torch.float32}
    case = Case(tp=1, pp=2, layers=4, more=more)
    models.start(case)
    host = train(stage(case))
    found = []
    for strategy, region, direct, settings in RUNS:
        torch._dynamo.reset()
        with megatron.apply(attention_kind="host"):
            model = stage(Case(tp=1, pp=2, layers=4, more={**more, **settings}))
            options = {"executor": "eager", "region": region, "strict": True}
            megatron.compile(model, strategy, into_main_grad=direct, **options)
            ours = train(model)
            used = [(u.region.phase, len(u.plan.sizes)) for u in df.plans(model)]
        found.append(
            {
                "losses": (ours["losses"], host["losses"]),
                "errors": Result(ours["main_grad"]).errors(Result(host["main_grad"])),
                "most": (ours["most"], host["most"]),
                "told": ours["told"],
                "plans": sorted(set(used)),
            }
        )
    models.stop()
    return found


def test_stages_give_megatrons_losses_and_main_grads():
    ranks = run_ranks(with_and_without, 2, timeout_s=280)
    for rank, found in enumerate(ranks):
        assert len(found) == len(RUNS)
        for one, (strategy, region, direct, _) in zip(found, RUNS, strict=True):
            where = f"{strategy} {region}"
            losses, wanted = one["losses"]
            assert len(wanted) == (0 if rank == 0 else STEPS * MICRO_STEPS)
            assert losses == pytest.approx(wanted, rel=1e-6), where
            assert max(one["errors"].values()) < 2e-5, where
            assert one["most"] == ((2, 2) if rank == 0 else (1, 1)), where
            assert one["plans"] == [("backward", 2), ("forward", 2)], where
            assert one["told"] >= 2 * 6 if direct else one["told"] == 0, where
