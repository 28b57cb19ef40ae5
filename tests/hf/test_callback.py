"""DynaFlowCallback inside a real Trainer: same training, numbers in the logs, model given back."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.errors import RecipeError
from dynaflow_train.integrations.hf.callback import DynaFlowCallback
from tests.hf.models import build, tokens
from tests.hf.trainers import losses, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", "ignore:.*runs sequentially:UserWarning"
)
EAGER = {"executor": "eager"}


def compiled(model: Any) -> list[str]:
    return [n for n, m in model.named_modules() if m._compiled_call_impl is not None]


@pytest.mark.parametrize("region", ["model", "layer"])
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_training_is_that_of_the_plain_trainer(tmp_path, region, arguments):
    plain = trainer(build("llama"), tmp_path, **arguments)
    plain.train()
    callback = DynaFlowCallback("dual_batch", region=region, **EAGER)
    ours = trainer(build("llama"), tmp_path, callback, **arguments)
    ours.train()
    tolerance = 2e-2 if arguments.get("bf16") else 1e-5
    assert losses(ours) == pytest.approx(losses(plain), rel=tolerance)
    assert len(set(losses(ours))) == 4
    norms = [[e["grad_norm"] for e in t.state.log_history if "loss" in e] for t in (ours, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)


def test_logs_carry_speed_and_hidden_share_and_the_capture_is_told_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ours = trainer(build("llama"), tmp_path, DynaFlowCallback("dual_batch", **EAGER))
    ours.train()
    steps = [entry for entry in ours.state.log_history if "loss" in entry]
    assert all(entry["tokens_per_second"] > 0 for entry in steps)
    assert steps[0]["hidden_share"] is None
    assert steps[-1]["hidden_share"] == 1.0  # one process has no communication to hide
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("dynaflow: ")]
    assert len(told) == 1
    assert "dual_batch, 2 layers, region 'model': forward " in told[0]
    assert "ops, 0 collectives; backward " in told[0]
    assert "0 graph breaks; micro-batches [2, 2]" in told[0]


class Spy(DynaFlowCallback):
    """Looks at the model while it is compiled."""

    seen: Any = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        super().on_step_end(args, state, control, model=model, **kwargs)
        self.seen = compiled(model)


@pytest.mark.parametrize("region", ["model", "layer"])
def test_model_is_compiled_in_place_and_given_back(tmp_path, region):
    model, spy = build("llama"), Spy("sequential", region=region, **EAGER)
    trainer(model, tmp_path, spy).train()
    assert spy.seen
    assert compiled(model) == []
    assert not model._forward_pre_hooks


def test_evaluation_and_generation_are_the_hosts(tmp_path):
    """Evaluated while compiled: same loss as a plain model of the same weights, same tokens."""
    model = df.compile(build("llama"), "dual_batch", **EAGER)
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    plain = build("llama")
    graphs = len(df.plans(model))
    ours, theirs = trainer(model, tmp_path), trainer(plain, tmp_path)
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    model.config.use_cache = plain.config.use_cache = True
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    torch.testing.assert_close(
        model.generate(tokens(1), **options), plain.generate(tokens(1), **options), rtol=0, atol=0
    )
    assert len(df.plans(model)) == graphs


def test_report_is_written_where_it_is_asked_for(tmp_path):
    callback = DynaFlowCallback("dual_batch", write=True, verify=True, **EAGER)
    trainer(build("llama"), tmp_path, callback).train()
    report = json.loads((tmp_path / "dynaflow" / "report.json").read_text())
    assert 0 < report["gradient_error"] < 1e-4
    assert report["copied_bytes"] == 0
    assert "dual_batch" in (tmp_path / "dynaflow" / "plan.txt").read_text()
    trace = json.loads((tmp_path / "dynaflow" / "trace.json").read_text())
    assert any("mlp" in event["name"] for event in trace["traceEvents"])
    assert (tmp_path / "dynaflow" / "timeline.png").stat().st_size > 10_000


def test_unknown_strategy_is_an_error_before_the_first_step(tmp_path):
    with pytest.raises(RecipeError, match="Did you mean 'dual_batch'"):
        trainer(build("llama"), tmp_path, DynaFlowCallback("dual_bach")).train()


def test_a_wrong_recipe_is_refused_when_the_callback_is_made(tmp_path):
    with pytest.raises(RecipeError, match="missing.yaml: cannot be read"):
        DynaFlowCallback(str(tmp_path / "missing.yaml"))
    (tmp_path / "r.yaml").write_text("strategy: dual_batch\nparameters: {cuts: 2}\n")
    with pytest.raises(RecipeError, match=r"r\.yaml: strategy 'dual_batch' has no parameter"):
        DynaFlowCallback(tmp_path / "r.yaml")
