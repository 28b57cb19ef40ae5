"""What a cut step copies on top of the uncut one, by torch's profiler."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from dynaflow_train.strategies.dual_batch import DualBatch
from dynaflow_train.strategies.sequential import Sequential
from tests.engine.harness import Switch, batch, compiled
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT
from tests.hf.models import build, tokens

BYTES = 4  # of a float
SCALARS = 128  # elements: the steps differ by some numbers, and by no tensor

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's look


def copied(run) -> tuple[int, int, int]:
    """Of the second run: the elements that copies move, the number of copies, and of `cat`s.

    `clone`, `contiguous`, `to` and `slice_scatter` all end in `copy_`.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        run()
    names = [event.name for event in seen.events()]
    shapes = [event.input_shapes[0] for event in seen.events() if event.name == "aten::copy_"]
    return sum(map(math.prod, shapes)), len(shapes), names.count("aten::cat")


def llama_step(strategy: object, **options: object):
    model, ids = df.compile(build("llama"), strategy, **options), tokens(0)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    return model, run


@pytest.mark.parametrize("region", ["model", "layer"])
def test_llama_copies_nothing_more(region):
    """Operators of eager torch write by their `out=` forms."""
    switch, found = Switch(*DualBatch.rules), {}
    model, run = llama_step(switch, executor="eager", region=region)
    for parts, strategy in {1: Sequential(), 2: DualBatch(), 4: DualBatch(micro_batches=4)}.items():
        switch.use(strategy)
        found[parts] = copied(run)
        used = [u for u in df.plans(model) if len(u.plan.sizes) == parts]
        assert {u.region.phase for u in used} == {"forward", "backward"}
        assert not any(u.copies for u in used)
    cats = {parts: number for parts, (_, _, number) in found.items()}
    for parts in (2, 4):
        assert 0 <= found[parts][0] - found[1][0] < SCALARS
    # The model's own are made by each micro-batch, or once; none joins the micro-batches.
    assert cats[4] - cats[2] == 2 * (cats[2] - cats[1])


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
        found[strategy] = copied(lambda model=model: step(model, batch(case, 4)))[0]
    copies = [dict(used.copies) for used in df.plans(model)]
    assert all(copies)
    total = sum(sum(each.values()) for each in copies) // BYTES
    assert total > 0
    assert 0 <= found["dual_batch"] - found["sequential"] - total < SCALARS
