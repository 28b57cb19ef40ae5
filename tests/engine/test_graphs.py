"""Replayed calls: memory that is read and written again and again, and who may still hold it.

The recorder of these tests keeps addresses only, as a CUDA graph does; tests/gpu has the real one.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train import strategies
from dynaflow_train.api import sessions
from dynaflow_train.benchmarks.variants import warmups
from dynaflow_train.execute.graphs import MOST_RECORDINGS, WARMUPS, Recordings
from dynaflow_train.session import Session
from tests.engine.harness import AnySchedule, Cut, Oracle, batch, compiled, quiet
from tests.engine.recorder import AddressRecorder
from tests.engine.stepping import step, weighted
from tests.engine.zoo import ALL, SPLIT
from tests.hf.models import build, tokens

BLOCK = SPLIT["block"]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def recorder(monkeypatch) -> AddressRecorder:
    made = AddressRecorder()
    monkeypatch.setattr(Session, "recorder", lambda session, device: made)
    return made


def recordings(model: nn.Module, phase: str) -> list[Recordings]:
    capture = sessions(model)[0].captures[-1]
    runners = capture.forwards if phase == "forward" else capture.backwards
    found = [entry.recordings for runner in runners for entry in runner.entries.values()]
    return [each for each in found if each is not None]


def count(model: nn.Module, phase: str) -> int:
    return sum(len(made) for each in recordings(model, phase) for made in each.made.values())


def train(model: nn.Module, case, steps: int, first: int = 0) -> None:
    """Steps on changing data, each exact."""
    for seed in range(first, first + steps):
        oracle = Oracle(case, 4, torch.float32, seed)
        oracle.check(step(model, batch(case, 4, seed=seed)), seed)
        gc.collect()


@pytest.mark.parametrize("name", list(ALL)[::3])
def test_replays_are_exact(name, recorder):
    model = compiled(ALL[name], AnySchedule(3), cuda_graphs=True)
    with quiet():
        train(model, ALL[name], WARMUPS + 3)
    assert count(model, "forward") == 1
    assert recorder.replays >= 3  # a forward's from the fourth call on
    assert not any(each.why_not for each in recordings(model, "forward"))


def test_a_backward_is_replayed_where_its_forward_was(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 10)
    assert (count(model, "forward"), count(model, "backward")) == (1, 1)
    assert recorder.recorded == 2
    assert recorder.replays == (10 - WARMUPS) + (10 - WARMUPS - 1)
    assert [used.graphs.split(",")[0] for used in df.plans(model)] == ["1 CUDA graph"] * 2
    assert "model backward: 1 CUDA graph" in str(df.explain(model))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_forwards_in_flight(order, recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    expected = [Oracle(BLOCK, 4, torch.float32, seed).truth for seed in range(3)]
    names = [n for n, _ in model.named_parameters()]
    wanted = {n: sum(truth.tensors[f"gradient of {n}"] for truth in expected) for n in names}
    for _ in range(6):
        model.zero_grad(set_to_none=True)
        losses = [weighted(model(*batch(BLOCK, 4, seed=seed))) for seed in range(3)]
        for loss, truth in zip(losses, expected, strict=True):
            torch.testing.assert_close(loss.double(), truth.tensors["loss"], rtol=1e-4, atol=1e-5)
        for index in order:
            losses[index].backward()
        losses.clear()
        del loss
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), wanted[name], rtol=1e-4, atol=1e-5)
    assert count(model, "forward") == 3
    assert recorder.replays > 12


def test_forwards_without_a_backward_use_one_recording(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    for seed in range(12):
        model(*batch(BLOCK, 4, seed=seed))
        gc.collect()
    assert count(model, "forward") == 1
    assert recorder.replays == 12 - WARMUPS
    train(model, BLOCK, 4)


def test_what_is_held_is_not_overwritten(recorder):
    """More in flight than there may be recordings: the rest runs launch by launch."""
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    number = WARMUPS + MOST_RECORDINGS + 3
    truths = [Oracle(BLOCK, 4, torch.float32, s).truth.tensors["output 0"] for s in range(number)]
    for _ in range(2):  # the second time all are free again
        held = [model(*batch(BLOCK, 4, seed=seed)) for seed in range(number)]
        assert count(model, "forward") == MOST_RECORDINGS
        for output, truth in zip(held, truths, strict=True):
            torch.testing.assert_close(output.double(), truth, rtol=1e-4, atol=1e-5)
        del output
        held.clear()
    assert recorder.replays == 2 * MOST_RECORDINGS


def test_gradients_that_are_held_are_not_overwritten(recorder):
    """Accumulated without zeroing: `.grad` is the memory of an earlier replay."""
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    wanted: dict[str, torch.Tensor] = {}
    for seed in range(10):
        weighted(model(*batch(BLOCK, 4, seed=seed))).backward()
        truth = Oracle(BLOCK, 4, torch.float32, seed).truth
        for name, parameter in model.named_parameters():
            addend = truth.tensors[f"gradient of {name}"]
            wanted[name] = wanted[name] + addend if name in wanted else addend
            torch.testing.assert_close(parameter.grad.double(), wanted[name], rtol=1e-4, atol=1e-5)


def test_one_forward_and_two_backwards(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 8)
    truth = Oracle(BLOCK, 4, torch.float32, 9).truth
    model.zero_grad(set_to_none=True)
    loss = weighted(model(*batch(BLOCK, 4, seed=9)))
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        wanted = 2 * truth.tensors[f"gradient of {name}"]
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_other_shapes_and_other_plans_have_their_own(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    for size in (4, 6, 4, 6, 2, 4, 6, 2, 4, 6, 2, 4, 6):
        Oracle(BLOCK, size, torch.float32).check(step(model, batch(BLOCK, size)))
        gc.collect()
    number = sorted(sum(map(len, each.made.values())) for each in recordings(model, "forward"))
    assert number == [0, 1, 1]  # a batch of 2 came three times only


def move(model: nn.Module) -> list[torch.Tensor]:
    """Parameters stand elsewhere from now on; who still reads where they stood, reads NaN."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 1
    for old in kept:
        old.fill_(torch.nan)
    return kept


def test_parameters_that_move_once_are_read_where_they_are(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 6)
    kept, before = move(model), recorder.replays
    train(model, BLOCK, 5, first=6)
    assert recorder.replays > before
    assert not any(each.why_not for each in recordings(model, "forward"))
    del kept


def test_what_moves_is_recorded_anew_and_the_old_memory_is_free_before(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 6)
    (found,) = recordings(model, "forward")
    (made,) = [each for known in found.made.values() for each in known]
    place, _ = made.inputs.popitem()  # as if it had stood still until now
    made.addresses[place] = -1  # where nothing stands: a freed address may come again
    found._moving.discard(place)
    recorded = recorder.recorded
    del made, _
    train(model, BLOCK, 3, first=6)
    assert place in found._moving
    assert recorder.released == [0], "its backward's recording goes with it"
    assert recorder.recorded == recorded + 2
    assert not found.why_not


def test_parameters_that_move_at_every_step_are_not_recorded(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 6)
    kept = []
    for seed in range(6, 12):
        kept.append(move(model))
        train(model, BLOCK, 1, seed)
    (found,) = recordings(model, "forward")
    assert "parameters stand elsewhere" in str(found)
    assert (count(model, "forward"), count(model, "backward")) == (0, 0), "their memory is free"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_each_of_equal_layers_has_its_own(recorder):
    """They share a context; nothing but what comes in from outside is copied."""
    model, reference = build("llama"), build("llama")
    df.compile(model, "dual_batch", executor="eager", region="layer", cuda_graphs=True)
    for seed in range(8):
        for each in (model, reference):
            each.zero_grad(set_to_none=True)
            each(input_ids=tokens(seed), labels=tokens(seed)).loss.backward()
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
        gc.collect()
    layers = len(model.model.layers)
    assert (count(model, "forward"), count(model, "backward")) == (layers, layers)
    assert recorder.replays >= 2 * layers * 4
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for each in recordings(model, "forward"):
        for made in each.made.values():
            for recording in made:
                assert len(weights & set(recording.addresses.values())) >= 7
                assert all(memory.dim() != 2 for memory in recording.inputs.values())


def test_what_cannot_be_recorded_runs_and_says_why(monkeypatch):
    class Refuses:
        def record(self, call, arguments):
            call(list(arguments))
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Session, "recorder", lambda session, device: Refuses())
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 6)
    reason = "runs launch by launch: it cannot be recorded: operation not permitted when stream is "
    assert {used.graphs for used in df.plans(model)} >= {reason + "capturing"}


def test_without_cuda_it_says_so_once():
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    with pytest.warns(
        df.DynaFlowWarning, match="cuda_graphs needs CUDA, the model is on cpu"
    ) as told:
        train(model, BLOCK, 2)
    assert len(told) == 1
    assert [used.graphs for used in df.plans(model)] == [None, None]


def test_tickets_do_not_pile_up(recorder):
    model = compiled(BLOCK, Cut(2), cuda_graphs=True)
    train(model, BLOCK, 5)
    records = sessions(model)[0].captures[-1].forwards[0].records
    before = len(records), len(records.live)
    train(model, BLOCK, 10, first=5)
    assert (len(records), len(records.live)) == before


def test_auto_records_its_candidates_and_keeps_the_memory_of_one(recorder, monkeypatch):
    monkeypatch.setenv("DYNAFLOW_CACHE", "off")
    names = ("sequential", "dual_batch", "nanoflow")
    options = {"candidates": names, "warmups": 1, "samples": 2}
    ready = warmups(strategies.get("auto", **options), graph=True)
    model = compiled(BLOCK, "auto", cuda_graphs=True, **options)
    with quiet():
        train(model, BLOCK, ready - 10)
        assert not df.explain(model).choices
        anew = 2 * len(recorder.released)  # where an input moved
        assert 2 * 3 <= recorder.recorded <= 2 * 3 + anew
        capture = sessions(model)[0].captures[-1]
        for runners in (capture.forwards, capture.backwards):
            entries = [e for runner in runners for e in runner.entries.values()]
            assert [sum(map(len, e.recordings.made.values())) for e in entries] == [0, 0, 1]
        train(model, BLOCK, 10)
    (choice,) = df.explain(model).choices
    assert {used.plan.strategy for used in df.plans(model)} == {choice.chosen}
    assert [used.graphs.split(",")[0] for used in df.plans(model)] == ["1 CUDA graph"] * 2
    assert len(df.explain(model)) == 2, "the choice is measured as well"
