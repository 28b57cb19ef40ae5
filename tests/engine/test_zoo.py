"""Every strategy on every model of the zoo: loss, outputs and each gradient of the unsplit run."""

from __future__ import annotations

import re

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.strategies.comm_overlap import CommOverlap
from dynaflow_train.strategies.dual_batch import DualBatch
from dynaflow_train.strategies.nanoflow import NanoFlow
from dynaflow_train.strategies.sequential import Sequential
from tests.engine.harness import (
    AnySchedule,
    Cut,
    Oracle,
    Switch,
    batch,
    compiled,
    merged_ops,
    quiet,
)
from tests.engine.stepping import step
from tests.engine.zoo import ALL, MIXING, SPLIT

BATCH = 4
STRATEGIES = {
    "sequential": Sequential(),
    "comm_overlap": CommOverlap(),
    "dual_batch": DualBatch(),
    "dual_batch of 3": DualBatch(micro_batches=3),
    "dual_batch, merged wgrads": DualBatch(merge_wgrads=True),
    "nanoflow": NanoFlow(micro_batches=4),
    "nanoflow, uneven": NanoFlow(sizes=(1, 2, 1)),
    "uneven": Cut((3, 1)),
    "any 0": AnySchedule(0),
    "any 1": AnySchedule(1),
}


def size_of(name: str) -> int:
    """Samples in the dimension that is cut."""
    return 2 * BATCH if name == "tokens_in_pairs" else BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALL)
def test_every_strategy_equals_the_unsplit_run(name, dtype):
    case, switch = ALL[name], Switch()
    oracle = Oracle(case, BATCH, dtype)
    model, inputs = compiled(case, switch, dtype), batch(case, BATCH, dtype)
    with quiet():
        for label, strategy in STRATEGIES.items():
            if "uneven" in label and size_of(name) != BATCH:
                continue
            switch.use(strategy)
            oracle.check(step(model, inputs), f"{name} {label}")
    cut = {len(used.plan.sizes) for used in df.plans(model)}
    assert {1, 2, 3, 4} <= cut, "the model was not cut"


@pytest.mark.parametrize("name", SPLIT)
def test_what_keeps_samples_apart_is_cut(name):
    switch = Switch()
    model = compiled(SPLIT[name], switch)
    switch.use(Cut(2))
    step(model, batch(SPLIT[name], BATCH))
    assert merged_ops(model) == {}
    assert all(used.plan.sizes == (2, 2) for used in df.plans(model))


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_runs_merged_and_names_operator_and_line(name):
    switch = Switch()
    model = compiled(MIXING[name], switch)
    switch.use(Cut(2))
    step(model, batch(MIXING[name], BATCH))
    reasons = list(merged_ops(model, "forward").values())
    for operator in MIXING[name].mixes:
        wanted = rf"\.\w*({operator})\w*\.\w+: .+ \(\w+\.py:\d+\)"
        assert any(re.search(wanted, reason) for reason in reasons), reasons
    forward = df.plans(model)[0]
    assert len(forward.plan.sizes) == 2
    for launch in forward.plan.launches:
        if forward.region.op[launch.ops[0]].reason:
            assert launch.micro_batches == (0, 1)
