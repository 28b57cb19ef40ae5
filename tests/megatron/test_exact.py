"""Our replacements against unmodified Megatron: one graph a layer, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.models import Case
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
FUSED, FUSIONS = "fused attention", "the host's jit functions"
CASES = {
    "grouped queries, qk-norm": Case(groups=2, qk_norm=True),
    "sequence parallel": Case(sequence_parallel=True),
    "layer norm, gelu, bias, learned positions": Case(
        rms=False, gated=False, bias=True, rotary=False
    ),
    FUSED: Case(groups=2, qk_norm=True, bias=True),
    FUSIONS: Case(
        bias=True,
        hidden_dropout=0.1,
        more={"bias_activation_fusion": True, "bias_dropout_fusion": True},
    ),
    "sequence parallel, all of it": Case(
        sequence_parallel=True, groups=2, qk_norm=True, bias=True, **DROPOUT
    ),
    "dropout": Case(**DROPOUT),
    "bf16": Case(bf16=True, bias=True),
    "one rank a group": Case(tp=1, bias=True),
}


def differences(rank: int) -> dict[str, Any]:
    """For each case: what differs from the host, and Dynamo's graphs and breaks."""
    del rank
    from torch._dynamo.utils import counters

    from dynaflow_train.capture import correct_gradients
    from dynaflow_train.integrations import megatron
    from tests.megatron import models

    found: dict[str, Any] = {}
    for name, case in CASES.items():
        models.start(case)
        with models.norms_alone():
            plain = models.build(case)
        # The host's fused functions would start compilers of their own.
        wanted = {} if name == FUSIONS else models.step(plain, models.batch())
        torch._dynamo.reset()
        counters.clear()
        kind = "sdpa" if name in (FUSIONS, FUSED) else "host"
        with megatron.apply(attention_kind=kind), correct_gradients():
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


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(differences, 2, timeout_s=280)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_one_graph(ranks, name):
    for found in ranks:
        assert found[name]["breaks"] == {}
        assert found[name]["graphs"] == 1  # two equal layers share it


@pytest.mark.parametrize("name", [n for n in CASES if n not in (FUSED, FUSIONS)])
def test_a_layer_has_the_hosts_bits(ranks, name):
    for found in ranks:
        assert found[name]["differ"] == {}
        assert found[name]["tensors"] > 15


def test_fused_attention_differs_by_rounding_only(ranks):
    for found in ranks:
        assert found[FUSED]["tensors"] > 15
        assert 0 < max(found[FUSED]["differ"].values()) < 5e-6
