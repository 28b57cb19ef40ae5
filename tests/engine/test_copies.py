"""What a cut step copies on top of the uncut one, by torch's profiler."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from tests.engine.harness import batch, compiled
from tests.engine.modules import LENGTH, WIDTH
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT
from tests.hf.models import build, tokens

BYTES = 4  # of a float
SCALARS = 64  # elements: the steps differ by some numbers, and by no tensor

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's look


def copied(run) -> tuple[int, int]:
    """How many copies one run makes, and how many elements they move; the second run counts.

    `clone`, `contiguous`, `to` and `slice_scatter` all end in `copy_`.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        run()
    events = [e for e in seen.events() if e.name in ("aten::copy_", "aten::cat")]
    assert all(event.input_shapes for event in events)
    return len(events), sum(math.prod(e.input_shapes[0]) for e in events if "copy" in e.name)


def llama_step(strategy: str, **options: object):
    model, ids = df.compile(build("llama"), strategy, **options), tokens(0)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    return model, run


@pytest.mark.parametrize(("region", "regions"), [("model", 1), ("layer", 2)])
def test_llama_copies_nothing_but_results_into_their_slices(region, regions):
    """Eager operators cannot write into a given slice: each result is copied there, once."""
    found = {}
    for strategy in ("sequential", "dual_batch"):
        torch._dynamo.reset()
        model, run = llama_step(strategy, executor="eager", region=region)
        found[strategy] = copied(run)[1]
        used = df.plans(model)
        assert {u.plan.sizes for u in used} == {(2, 2) if strategy == "dual_batch" else (4,)}
        assert [dict(u.copies) for u in used] == [{}] * len(used)
    results = 2 * regions * 4 * 12 * 32  # output and gradient, [batch, sequence, hidden]
    assert 0 <= found["dual_batch"] - found["sequential"] - results < SCALARS


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("region", ["model", "layer"])
def test_llama_copies_nothing_more_compiled_by_inductor(region):
    found = {}
    for strategy in ("sequential", "dual_batch"):
        torch._dynamo.reset()
        model, run = llama_step(strategy, executor="inductor", region=region)
        found[strategy] = copied(run)
        assert not any(used.copies for used in df.plans(model))
    assert found["dual_batch"] == found["sequential"]


def test_what_must_be_copied_is_counted_and_named():
    """Tokens flattened sequence first: a micro-batch is no slice of them."""
    case, found = SPLIT["flat_sb"], {}
    for strategy in ("sequential", "dual_batch"):
        torch._dynamo.reset()
        model = compiled(case, strategy)
        found[strategy] = copied(lambda model=model: step(model, batch(case, 4)))[1]
    copies = [dict(used.copies) for used in df.plans(model)]
    assert all(copies)
    total = sum(sum(each.values()) for each in copies) // BYTES
    results = 2 * LENGTH * 4 * WIDTH
    assert total > 0
    assert 0 <= found["dual_batch"] - found["sequential"] - total - results < SCALARS
