"""torch 2.11 computes wrong gradients of autograd.Functions that write into what they return."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train.capture.gradients211 import is_affected, is_corrected
from tests.ranks import run_ranks


class Doubled(torch.autograd.Function):
    """As Megatron-core's mappings: a fresh buffer, written in place, returned."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        out = torch.empty_like(x)
        out.copy_(x * 2)
        return out

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad * 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(Doubled.apply(self.first(x)).relu())


def gradients(model):
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", ["in place", "backend"])
def test_gradients_are_right_on_every_torch(compiled):
    wanted, model = gradients(Layer()), Layer()
    if compiled == "in place":
        df.compile(model, "dual_batch", executor="eager")
    else:
        model.compile(backend="dynaflow", options={"executor": "eager"})
    for found, exact in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    found = [p.plan.sizes for p in df.plans(model)]
    assert found == [(2, 2), (2, 2)]
    if compiled == "in place":
        assert not is_corrected(), "Dynamo is as it was once the call is over"


def plain_error(rank):
    del rank
    model = Layer()
    model.compile(backend="aot_eager")
    wrong, right = gradients(model), gradients(Layer())
    return float((wrong[0] - right[0]).norm() / right[0].norm())


@pytest.mark.dist
@pytest.mark.skipif(not is_affected(), reason=f"needs torch 2.11, found {torch.__version__}")
def test_without_the_correction_this_torch_is_wrong():
    (error,) = run_ranks(plain_error, 1)  # a process in which nothing is corrected
    assert error > 0.5
