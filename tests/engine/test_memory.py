"""What a step holds at its peak, by torch's profiler, against torch.compile for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from tests.hf.models import build, tokens

if TYPE_CHECKING:
    import torch

MEMORY = "[memory]"  # the profiler's event of an allocation or, with negative bytes, a release

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's look


def peak(model: torch.nn.Module) -> int:
    """Bytes of the fifth step's peak, its gradients included."""
    ids = tokens(0)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids).logits.square().mean().backward()

    for _ in range(4):
        run()
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY)
    held = highest = 0
    for _, size in changes:
        held += size
        highest = max(highest, held)
    return highest


@pytest.mark.parametrize("strategy", ["sequential", "dual_batch"])
def test_an_op_frees_what_it_read_last_while_it_runs(strategy):
    """Few tokens: what a step has saved is little beside its gradients, if it goes in time."""
    plain = build("llama")
    for layer in plain.model.layers:
        layer.compile()
    ours = df.compile(build("llama"), strategy)
    assert peak(ours) <= 1.05 * peak(plain)
