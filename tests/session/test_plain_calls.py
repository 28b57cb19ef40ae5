"""Calls that torch.compile leaves as they are: they train as ever, and somebody says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dynaflow_train as df
from tests.hf.models import build, tokens

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Numbered(nn.Module):
    """An MLP whose layer's number is a constant to Dynamo."""

    def __init__(self, inner: nn.Module, number: int) -> None:
        super().__init__()
        self.inner, self.number = inner, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.number


def numbered() -> nn.Module:
    model = build("llama", layers=3)
    for number, layer in enumerate(model.model.layers, 1):
        layer.mlp = Numbered(layer.mlp, number)
    return model


def train(model: nn.Module, **options: Any) -> list[str]:
    """What was warned of in a step; gradients are those of the plain model."""
    reference = numbered()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", df.DynaFlowWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        df.compile(model, "dual_batch", executor="eager", **options)
        for each in (model, reference):
            each(input_ids=tokens(1), labels=tokens(1)).loss.backward()
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    return [str(w.message) for w in caught if issubclass(w.category, df.DynaFlowWarning)]


def test_layers_beyond_the_limit_of_recompiles_are_told_of_once():
    with torch._dynamo.config.patch(recompile_limit=1):
        (told,) = train(numbered(), region="layer")
    assert told.startswith("LlamaDecoderLayer runs plain in some calls")
    assert "after 1 of them (torch._dynamo.config.recompile_limit)" in told


def test_one_graph_of_all_layers_needs_no_more():
    with torch._dynamo.config.patch(recompile_limit=1):
        assert not train(numbered(), region="model")
