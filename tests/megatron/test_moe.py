"""Experts over two ranks, scheduled, against unmodified Megatron: a step of each, and training."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.megatron.models import Case
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, MICRO_STEPS = 3, 2
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
CASES: dict[str, tuple[Case, str]] = {
    "aux and z loss, gated shared expert": (
        Case(
            tp=1,
            experts=8,
            more={
                "moe_aux_loss_coeff": 1e-2,
                "moe_z_loss_coeff": 1e-3,
                "moe_shared_expert_intermediate_size": 24,
                "moe_shared_expert_gate": True,
            },
        ),
        "layer",
    ),
    "groups of experts, bias, loss by sequence, top 4": (
        Case(
            tp=1,
            experts=8,
            more={
                **SIGMOID,
                "moe_router_topk": 4,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
                "moe_router_pre_softmax": True,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "seq_aux_loss",
                "moe_aux_loss_coeff": 1e-2,
                "moe_shared_expert_intermediate_size": 24,
            },
        ),
        "layer",
    ),
    "top 1, losses over ranks and per token, after a dense layer": (
        Case(
            tp=1,
            experts=4,
            more={
                "moe_layer_freq": [0, 1],
                "moe_router_topk": 1,
                "moe_router_pre_softmax": True,
                "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [1e-2, 1e-2],
                "calculate_per_token_loss": True,
                "moe_ffn_hidden_size": 40,
            },
        ),
        "model",
    ),
    "beside tensor and sequence parallelism": (
        Case(
            tp=2,
            sequence_parallel=True,
            experts=4,
            more={
                "moe_aux_loss_coeff": 1e-2,
                "moe_z_loss_coeff": 1e-3,
                "moe_shared_expert_intermediate_size": 24,
            },
        ),
        "layer",
    ),
    "all tokens to two experts of one rank": (Case(tp=1, experts=8, more=SIGMOID), "layer"),
}
STRATEGIES: dict[str, dict[str, Any]] = {"comm_overlap": {}, "dual_batch": {"micro_batches": 2}}
SKEWED = "all tokens to two experts of one rank"
TRAINED = "groups of experts, bias, loss by sequence, top 4"
RUNS = [("comm_overlap", "layer", False), ("dual_batch", "layer", True)]


def build(name: str) -> Any:
    """A model of the case, the same each time; what its router adds up starts anew."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from tests.megatron import models

    destroy_moe_metrics_tracker()
    model = models.build(CASES[name][0])
    for layer in model.decoder.layers if name == SKEWED else ():
        layer.mlp.router.expert_bias[:2] = 10.0  # above any score
    return model


def step(model: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients, what routers counted and what Megatron logs of their losses."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from tests.megatron import models

    rank = torch.distributed.get_rank()
    found = {f"gradient {k}": v for k, v in models.step(model, models.batch(3 + rank)).items()}
    buffers = dict(model.named_buffers())
    for name in [n for n in buffers if n.endswith(("tokens_per_expert", "ga_steps"))]:
        found[f"count {name}"] = buffers[name].clone()
        buffers[name].zero_()
    for name, entry in get_moe_metrics_tracker().metrics.items():
        found[f"logged {name}"] = entry.values.clone()
    get_moe_metrics_tracker().clear()
    return found


def every_strategy(name: str) -> dict[str, Any]:
    """Against a step in fp64; Megatron's own says how far from it ours may be."""
    from dynaflow_train import strategies
    from dynaflow_train.integrations import megatron
    from tests.engine.harness import Switch
    from tests.engine.stepping import Result
    from tests.megatron import models

    with models.norms_alone():
        truth, host = Result(step(build(name).double())), Result(step(build(name)))
    allowed = {k: 2 * e + 1e-5 for k, e in host.errors(truth).items()}
    empty = [k for k, v in host.tensors.items() if "local_experts" in k and not v.any()]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found: dict[str, Any] = {"empty": len(empty)}
    with megatron.apply():
        switch, model = Switch(*strategies.get("dual_batch").rules), build(name)
        options = {"region": CASES[name][1], "executor": "eager", "strict": True}
        megatron.compile(model, switch, **options)
        for strategy, parameters in {"sequential": {}, **STRATEGIES}.items():
            switch.use(strategies.get(strategy, **parameters))
            errors = Result(step(model)).errors(truth)
            found[strategy] = (
                {k: e for k, e in errors.items() if not e <= allowed[k]},
                *of_plans(model),
            )
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def of_plans(model: Any) -> tuple[Any, ...]:
    """Micro-batches; what an expert's products wait for, over both phases."""
    import dynaflow_train as df

    used = {(u.region.name, u.region.phase): u for u in df.plans(model)}.values()
    waits = {
        before
        for u in used
        for op in u.region.ops
        if op.name.endswith("mlp.rows")
        for before in u.region.predecessors[op.name]
    }
    return {len(u.plan.sizes) for u in used}, waits


def train(model: Any) -> dict[str, Any]:
    """Steps of two micro-steps, Megatron's data parallelism, expert bias updates and Adam."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from tests.megatron import cpu, models
    from tests.megatron.test_ddp import wrapped

    ddp, optimizer = wrapped(model, False, False)
    losses = []
    for number in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for micro_step in range(MICRO_STEPS):
            last = micro_step == MICRO_STEPS - 1
            seed = 100 * number + 10 * micro_step + torch.distributed.get_rank()
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(**models.batch(seed)).mean()
                loss.backward()
            losses.append(loss.item())
        finalize_model_grads([ddp])
        grads = {n: p.main_grad.clone() for n, p in model.named_parameters()}
        with cpu.SaysCuda():
            optimizer.step()
    return {
        "losses": losses,
        "main_grad": grads,
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "bias": {n: b.clone() for n, b in model.named_buffers() if n.endswith("expert_bias")},
        "added": [n for n, p in model.named_parameters() if p.grad_added_to_main_grad],
    }


def trained() -> list[dict[str, Any]]:
    from dynaflow_train.integrations import megatron
    from tests.engine.stepping import Result

    host, found = train(build(TRAINED)), []
    for strategy, region, direct in RUNS:
        torch._dynamo.reset()
        with megatron.apply(attention_kind="host"):
            model = build(TRAINED)
            options = {"region": region, "executor": "eager", "strict": True}
            megatron.compile(model, strategy, into_main_grad=direct, **options)
            ours = train(model)
        kinds = ("main_grad", "parameters", "bias")
        found.append(
            {k: max(Result(ours[k]).errors(Result(host[k])).values()) for k in kinds}
            | {"losses": (ours["losses"], host["losses"]), "added": ours["added"]}
            | {"moved": min(float(b.abs().max()) for b in host["bias"].values())}
        )
    return found


def refusals() -> list[str]:
    """What is said of modules that stand where others are known."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.router import TopKRouter

    from dynaflow_train.errors import UnsupportedError
    from dynaflow_train.integrations.megatron.versions import check_model

    class Router(TopKRouter):
        pass

    class Expert(MLP):
        pass

    said, name = [], "aux and z loss, gated shared expert"
    for which, kind in (("router", Router), ("expert", Expert)):
        model = build(name)
        moe = model.decoder.layers[-1].mlp
        part = moe.router if which == "router" else moe.experts.local_experts[0]
        part.__class__ = kind
        try:
            check_model(model, list(model.decoder.layers))
        except UnsupportedError as error:
            said.append(str(error))
    with contextlib.suppress(UnsupportedError):
        model = build(name)
        check_model(model, list(model.decoder.layers[0].mlp.experts.local_experts))
        said.append("experts alone were taken for layers")
    return said


def everything(rank: int) -> dict[str, Any]:
    del rank
    from tests.megatron import models

    steps, more = {}, {}
    for tp in (2, 1):
        names = [name for name, (case, _) in CASES.items() if case.tp == tp]
        models.start(CASES[names[0]][0])
        steps |= {name: every_strategy(name) for name in names}
        more = {"training": trained(), "refusals": refusals()} if tp == 1 else {}
        models.stop()
    return {"steps": steps, **more}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(everything, 2, timeout_s=280)


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_gives_megatrons_losses_gradients_counts_and_logs(ranks, name):
    for rank, found in enumerate(ranks):
        one = found["steps"][name]
        assert one["graphs"] == 1  # one for all layers, whatever their number is
        for strategy in ("sequential", *STRATEGIES):
            bad, sizes, waits = one[strategy]
            assert bad == {}, strategy
            assert sizes == {2 if strategy == "dual_batch" else 1}
            assert not any("merged" in before for before in waits), waits
        layers = CASES[name][0].layers
        assert one["empty"] == (0 if name != SKEWED else layers * 2 * (2, 4)[rank])


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda i: " ".join(map(str, RUNS[i])))
def test_main_grads_optimizer_steps_and_bias_updates_are_megatrons(ranks, number):
    for found in ranks:
        one = found["training"][number]
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-6)
        assert one["main_grad"] < 2e-5
        assert one["parameters"] < 1e-5
        assert one["bias"] == 0  # signs of counts
        assert one["moved"] > 0
        experts = [n for n in one["added"] if "local_experts" in n]
        assert len(experts) == (16 if RUNS[number][2] else 0)


def test_modules_of_another_kind_are_refused(ranks):
    for found in ranks:
        router, expert = found["refusals"]
        assert "where a TopKRouter stands, found Router" in router
        assert "where a MLP stands, found Expert: build the model by" in expert
