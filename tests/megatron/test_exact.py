"""Our replacements against unmodified Megatron: one graph a layer, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.models import Case
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow]

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
CASES = {
    "rms, swiglu": Case(),
    "sequence parallel": Case(sequence_parallel=True),
    "layer norm, gelu, bias, learned positions": Case(
        rms=False, gated=False, bias=True, rotary=False
    ),
    "grouped queries, qk-norm, bias": Case(groups=2, qk_norm=True, bias=True),
    "sequence parallel, all of it": Case(
        sequence_parallel=True, groups=2, qk_norm=True, bias=True, **DROPOUT
    ),
    "dropout": Case(bias=True, **DROPOUT),
    "bf16": Case(bf16=True, bias=True),
    "one rank a group": Case(tp=1, bias=True),
}


def differences(rank: int, cases: dict[str, Case], fused: bool) -> dict[str, Any]:
    """For each case: what differs from the host, and Dynamo's graphs and breaks."""
    del rank
    from torch._dynamo.utils import counters

    from dynaflow_train.capture import correct_gradients
    from dynaflow_train.integrations import megatron
    from tests.megatron import models

    found: dict[str, Any] = {}
    for name, case in cases.items():
        models.start(case)
        with models.norms_alone():
            plain = models.build(case)
        wanted = models.step(plain, models.batch())
        torch._dynamo.reset()
        counters.clear()
        with megatron.apply(attention_kind="sdpa" if fused else "host"), correct_gradients():
            ours = models.build(case)
            for layer in ours.decoder.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            got = models.step(ours, models.batch())
        errors = {k: float((got[k].double() - w.double()).norm()) for k, w in wanted.items()}
        sizes = {k: float(w.double().norm()) for k, w in wanted.items()}
        found[name] = {
            "differ": {k: e / sizes[k] for k, e in errors.items() if e > 0},
            "tensors": len(wanted) if got.keys() == wanted.keys() else None,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
        }
        models.stop()
    return found


def test_a_layer_is_one_graph_with_the_hosts_bits():
    for rank in run_ranks(differences, 2, CASES, False):
        assert list(rank) == list(CASES)
        for name, found in rank.items():
            assert found["breaks"] == {}, name
            assert found["graphs"] == 1, name  # two equal layers share it
            assert found["differ"] == {}, name
            assert found["tensors"] > 15, name


def test_fused_attention_differs_by_rounding_only():
    cases = {k: CASES[k] for k in ("rms, swiglu", "grouped queries, qk-norm, bias")}
    for rank in run_ranks(differences, 2, cases, True):
        for name, found in rank.items():
            assert found["breaks"] == {}, name
            assert 0 < max(found["differ"].values()) < 5e-6, name


def fusions(rank: int) -> tuple[int, dict[str, int]]:
    """Graphs and breaks of a layer with the host's own fused functions on."""
    del rank
    from torch._dynamo.utils import counters

    from dynaflow_train.capture import correct_gradients
    from dynaflow_train.integrations import megatron
    from tests.megatron import models

    case = Case(bias=True, layers=1, more=FUSED, hidden_dropout=0.1)
    models.start(case)
    with megatron.apply(), correct_gradients():
        model = models.build(case)
        for layer in model.decoder.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        models.step(model, models.batch())
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_the_hosts_jit_functions_are_traced_into_the_graph():
    assert run_ranks(fusions, 2) == [(1, {}), (1, {})]
