"""The calls around a model: compile and undo, verify, plans on disk, explain."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train.dispatch import Dispatcher
from dynaflow_train.errors import CaptureError, DynaFlowError, RecipeError
from dynaflow_train.schedule.text import loads
from tests.engine.harness import Cut, Oracle, batch, compiled, plain
from tests.engine.parallel import PARALLEL, Stack
from tests.engine.stepping import step
from tests.engine.zoo import ALL, SPLIT, Case, rows
from tests.ranks import run_ranks

SMALL = SPLIT["bias_free"]
LAYERS = Case(lambda: Stack(nn.Linear(6, 6), nn.Linear(6, 6)), rows(5, 6))


def dispatchers(model) -> int:
    return sum(isinstance(m._compiled_call_impl, Dispatcher) for m in model.modules())


@pytest.mark.parametrize("region", ["model", "layer"])
def test_undo_gives_the_model_back(region):
    reference, model = plain(LAYERS), plain(LAYERS)
    before, inputs = list(model.state_dict()), batch(LAYERS, 4)
    df.compile(model, Cut(2), executor="eager", region=region)
    assert dispatchers(model) == 2
    step(model, inputs)
    assert df.undo(model) is model
    assert dispatchers(model) == 0
    assert all(m._compiled_call_impl is None for m in model.modules())
    assert list(model.state_dict()) == before
    found, wanted = step(model, inputs).tensors, step(reference, inputs).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    df.undo(model)  # nothing left to do
    df.compile(model, "dual_batch", executor="eager", region=region)  # and it may begin again
    Oracle(LAYERS, 4, torch.float32).check(step(model, inputs))


def test_undo_gives_back_what_was_compiled_before():
    model = plain(SMALL)
    model.compile(backend="eager")
    before = model._compiled_call_impl
    df.compile(model, "dual_batch")
    assert model._compiled_call_impl is not before
    assert df.undo(model)._compiled_call_impl is before


def test_a_model_is_compiled_once():
    model = compiled(LAYERS, Cut(2))
    for again in (model, nn.Sequential(model), model.layers[1]):
        with pytest.raises(CaptureError, match=r"compiled already: call df\.undo\(model\) first"):
            df.compile(again, "dual_batch")


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("dual_bach", {}, r"'dual_bach'.*Did you mean 'dual_batch'\?"),
        ("dual_batch", {"micro_batch": 2}, r"micro_batch'.*Did you mean 'micro_batches'\?"),
        ("dual_batch", {"region": "layers"}, r"'region' must be one of .*found 'layers' \(str\)"),
        (df.Recipe("dual_batch"), {"strict": True}, r"\['strict'\] were given beside a recipe"),
        ("nowhere.yaml", {}, r"recipe nowhere\.yaml: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_the_model_left_alone(what, options, message):
    model = plain(SMALL)
    with pytest.raises(RecipeError, match=message):
        df.compile(model, what, **options)
    assert dispatchers(model) == 0


@pytest.fixture(scope="module")
def used_model():
    model = compiled(LAYERS, Cut((3, 1)))
    for _ in range(3):
        step(model, batch(LAYERS, 4))
    return model


def test_plans_are_saved_and_loaded(used_model, tmp_path):
    forward, backward = df.plans(used_model)
    assert (forward.region.phase, backward.region.phase) == ("forward", "backward")
    for number, used in enumerate((forward, backward)):
        used.save(tmp_path / f"{number}.txt")
        text = (tmp_path / f"{number}.txt").read_text(encoding="utf-8")
        assert loads(text) == used.plan
        assert str(used) == text
        assert "sizes    3 1" in text
        assert text.count("\n") == 4 + len(used.plan.launches)


def test_plans_are_drawn_and_traced(used_model, tmp_path):
    used = df.plans(used_model)[1]
    assert used.draw(tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(used.trace(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(used.plan.launches)
    names = {name for launch in used.plan.launches for name in launch.ops}
    assert all(any(name in event["name"] for event in spans) for name in names)


@pytest.mark.parametrize("name", ["block", "buffers"])
def test_verify_compares_and_puts_everything_back(name):
    case, inputs = ALL[name], batch(ALL[name], 4)
    model = compiled(case, Cut((3, 1)))
    step(model, inputs)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    kept = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    found = df.verify(model, inputs)
    assert found.loss < 1e-5
    assert found.gradients.keys() == kept.keys()
    assert found.worst[1] == max(found.gradients.values()) < 1e-5
    assert str(found) == (
        f"loss {found.loss:.2e}; worst of {len(kept)} gradients {found.worst[1]:.2e} "
        f"({found.worst[0]})"
    )
    assert torch.equal(torch.get_rng_state(), state)
    for each, parameter in model.named_parameters():
        tensor, values = kept[each]
        assert parameter.grad is tensor
        assert torch.equal(tensor, values)
    for each, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[each]), each
    Oracle(case, 4, torch.float32).check(step(model, inputs))  # scheduled again


def test_verify_shows_a_wrong_step():
    """What only the scheduled step does: twice the gradient of a weight."""
    model = compiled(SMALL, Cut(2))
    weight = model.net[0].weight
    weight.register_hook(lambda g: 2 * g if model._compiled_call_impl.enabled else g)
    found = df.verify(model, batch(SMALL, 4)[0])
    assert found.worst == ("net.0.weight", pytest.approx(1.0))
    assert found.loss < 1e-5


def test_verify_takes_a_mapping_and_a_loss():
    model = compiled(SMALL, Cut(2))
    found = df.verify(model, {"x": batch(SMALL, 4)[0]}, loss=lambda out: out.exp().sum())
    assert list(found.gradients) == ["net.0.weight"]
    assert max(found.loss, found.worst[1]) < 1e-5


def test_verify_and_plans_of_a_model_that_is_not_compiled():
    with pytest.raises(
        CaptureError, match=r"not compiled: call df\.compile\(model, \.\.\.\) first"
    ):
        df.verify(plain(SMALL), batch(SMALL, 4)[0])
    assert df.plans(plain(SMALL)) == ()
    assert str(df.explain(plain(SMALL))).startswith("the model is not compiled")


class Mine(df.Strategy):
    rules = ()


@pytest.mark.parametrize(
    ("model", "what", "options", "message"),
    [
        (SMALL, Mine, {}, r"Mine is a class: give an instance, Mine\(\)"),
        (SMALL, "recipes/llama_tp2", {}, r"no strategy 'recipes/llama_tp2'; a recipe file's name"),
        (SMALL, "dual_batch", {"micro_batches": 0}, "needs at least 1 micro-batch, got"),
        (SMALL, "nanoflow", {"micro_batches": -1}, "needs at least 1 micro-batch, got"),
        (None, "dual_batch", {}, r"takes a torch\.nn\.Module, found NoneType"),
    ],
)
def test_what_cannot_be_compiled_says_what_to_give(model, what, options, message):
    with pytest.raises(DynaFlowError, match=message):
        df.compile(plain(model) if model else model, what, **options)


def test_a_context_that_runs_uncut_and_one_without_collectives_say_so():
    model = compiled(SMALL, "dual_batch", min_tokens=10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(model, batch(SMALL, 4))
    (forward, _) = str(df.explain(model)).split("\n\n")
    assert "it runs sequentially: " in forward
    assert "min_tokens=1000000" in forward
    assert "no collectives: nothing to hide" in forward


def explained(rank: int, strategy: str) -> list[object]:
    del rank
    case = PARALLEL["gathered_head"]
    model = compiled(case, strategy)
    for _ in range(2):
        step(model, batch(case, 4))
    early = len(df.explain(model))
    step(model, batch(case, 4))
    found = df.explain(model)
    reasons = [c.reason for each in found for c in each.collectives if c.exposed_ms > 0.05 * c.ms]
    assert repr(found) == str(found)
    assert list(map(repr, df.plans(model))) == [
        f"<{used.region.name} {phase}: sequential [4], {len(used.plan.launches)} launches>"
        for used, phase in zip(df.plans(model), ("forward", "backward"), strict=True)
    ]
    return [early, [len(each.collectives) for each in found], reasons, str(found)]


@pytest.mark.dist
def test_explain_says_what_became_of_each_collective():
    for early, numbers, reasons, text in run_ranks(explained, 2, "sequential"):
        assert early == 0  # the third call is measured
        assert numbers == [1, 2]  # a gather; its scatter and a sum
        assert len(reasons) == 3
        assert all(
            reason.startswith("sequential: all compute is on its stream") for reason in reasons
        )
        assert text.count("0% hidden") == 2
        assert "forward.all_gather" in text
