"""Every strategy on a GPT model, whole stack and layer by layer, against unmodified Megatron."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.megatron.models import Case
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

STRATEGIES: dict[str, dict[str, Any]] = {
    "comm_overlap": {},
    "dual_batch": {"micro_batches": 2},
    "nanoflow": {"sizes": (1, 3)},
}
MICRO_BATCHES = {"sequential": 1, "comm_overlap": 1, "dual_batch": 2, "nanoflow": 2}
# Forward and backward of one layer, in the order of the region.
COLLECTIVES = {
    False: (["all_reduce"] * 2, ["all_reduce"] * 2),
    True: (
        ["all_gather", "reduce_scatter"] * 2,
        ["all_gather"] * 2 + ["reduce_scatter"] + ["all_gather"] * 2 + ["reduce_scatter"],
    ),
}


def references(case: Case) -> tuple[Any, dict[str, torch.Tensor], dict[str, float]]:
    """A step in fp64, Megatron's own, and how far from the truth ours may be for that."""
    from tests.engine.stepping import Result
    from tests.megatron import models

    with models.norms_alone():
        plain, exact = models.build(case), models.build(case)
    # Its own loss is in fp32 in any case; what it rounds is in `plain` too.
    truth = Result(models.step(exact.double(), models.batch()))
    host = models.step(plain, models.batch())
    factor, floor = (4, torch.finfo(torch.bfloat16).eps / 2) if case.bf16 else (2, 1e-5)
    return truth, host, {k: factor * e + floor for k, e in Result(host).errors(truth).items()}


def every_strategy(rank: int, case: Case, regions: tuple[str, ...]) -> Any:
    del rank
    from dynaflow_train import strategies
    from dynaflow_train.integrations import megatron
    from tests.engine.harness import Switch
    from tests.megatron import models

    models.start(case)
    truth, host, allowed = references(case)
    found = {}
    with megatron.apply():
        for region in regions:
            torch._dynamo.reset()
            options = {"region": region, "executor": "eager", "strict": True}
            alone = models.build(case)
            megatron.compile(alone, "sequential", **options)
            models.step(alone, models.batch(seed=5))
            found[region, "sequential"] = one(alone, truth, host, allowed)
            # The others cut alike: one capture serves them all.
            switch = Switch(*strategies.get("dual_batch").rules)
            model = models.build(case)
            megatron.compile(model, switch, **options)
            for name, parameters in STRATEGIES.items():
                switch.use(strategies.get(name, **parameters))
                found[region, name] = one(model, truth, host, allowed)
    return found


def one(model: Any, truth: Any, host: Any, allowed: Any) -> dict[str, Any]:
    """A step of a compiled model, and the plans that ran it."""
    import dynaflow_train as df
    from tests.engine.stepping import Result
    from tests.megatron import models

    got = Result(models.step(model, models.batch()))
    # The newest of each graph: those of the strategies before stay in use.
    used = list({(u.region.name, u.region.phase): u for u in df.plans(model)}.values())
    return {
        "bad": {k: e for k, e in got.errors(truth).items() if not e <= allowed[k]},
        "loss": bool(torch.equal(got.tensors["loss"], host["loss"])),
        "micro_batches": {len(u.plan.sizes) for u in used},
        "copies": {u.region.phase: dict(u.copies) for u in used if u.copies},
        "merged": [op.reason for u in used for op in u.region.ops if op.reason],
        "collectives": [
            [
                re.sub(r"\.\d+$", "", op.name).rpartition(".")[2]
                for op in u.region.ops
                if op.is_communication
            ]
            for u in used
        ],
    }


def check(found: Any, case: Case) -> None:
    for (region, name), one in found.items():
        where = f"{region} {name}"
        assert one["bad"] == {}, where
        assert one["micro_batches"] == {MICRO_BATCHES[name]}, where
        assert one["merged"] == [], where
        times = case.layers if region == "model" else 1
        wanted = [kinds * times for kinds in COLLECTIVES[case.sequence_parallel]]
        assert [sorted(c) for c in one["collectives"]] == [sorted(w) for w in wanted], where
        # Cut on dimension 1, an incoming gradient is strided, and gloo and NCCL gather no such.
        gathered = case.sequence_parallel and MICRO_BATCHES[name] > 1
        assert set(one["copies"]) <= ({"backward"} if gathered else set()), where


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2 sp"])
def test_two_ranks_give_megatrons_losses_and_gradients(sequence_parallel):
    case = Case(sequence_parallel=sequence_parallel, groups=2, bias=True)
    for found in run_ranks(every_strategy, 2, case, ("model", "layer"), timeout_s=280):
        assert len(found) == 8
        check(found, case)


def compiled(rank: int) -> Any:
    """With sequence parallelism, compiled by Inductor."""
    del rank
    from dynaflow_train.integrations import megatron
    from tests.megatron import models

    case = Case(sequence_parallel=True, groups=2)
    models.start(case)
    truth, host, allowed = references(case)
    torch._dynamo.reset()
    with megatron.apply():
        model = models.build(case)
        megatron.compile(model, "dual_batch", region="layer", strict=True)
        models.step(model, models.batch(seed=5))
        found = {("layer", "dual_batch"): one(model, truth, host, allowed)}
    models.stop()
    return found


@pytest.mark.timeout(300)
def test_compiled_layers_give_megatrons_losses_and_gradients():
    for found in run_ranks(compiled, 2, timeout_s=280):
        check(found, Case(sequence_parallel=True))
