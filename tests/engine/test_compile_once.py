"""Equal ops of different layers are compiled once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import dynaflow_train as df
from dynaflow_train.api import sessions
from dynaflow_train.execute import compile as compiling
from tests.engine.harness import Cut, Oracle, batch, compiled
from tests.engine.parallel import Stack
from tests.engine.stepping import step
from tests.engine.zoo import Case, rows

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's look


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class PerLayer(Cut):
    """Each layer an op, two equal micro-batches."""

    rules = (df.SplitModule(Layer, optional=True),)


def compilations(monkeypatch, widths: list[int], **options: object) -> tuple[int, int, int]:
    """Ops compiled and reused by a session, and how often Inductor was called."""
    case = Case(lambda: Stack(*(Layer(width) for width in widths)), rows(3, 6))
    calls, inner = [], compiling.compile_fx_inner

    def counted(*args, **kwargs):
        calls.append(args)
        return inner(*args, **kwargs)

    monkeypatch.setattr(compiling, "compile_fx_inner", counted)
    torch._dynamo.reset()
    model = compiled(case, PerLayer(2), **options)
    Oracle(case, 4, torch.float32).check(step(model, batch(case, 4)), widths)
    monkeypatch.setattr(compiling, "compile_fx_inner", inner)
    (session,) = sessions(model)
    return session.compiler.compiled, session.compiler.reused, len(calls)


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=[pytest.mark.slow])])
@pytest.mark.parametrize("region", ["model", "layer"])
def test_twice_the_layers_compile_no_more(monkeypatch, region, executor):
    two = compilations(monkeypatch, [6] * 2, executor=executor, region=region)
    four = compilations(monkeypatch, [6] * 4, executor=executor, region=region)
    assert four[0] == two[0] > 2
    assert four[2] == two[2] == (four[0] if executor == "inductor" else 0)
    if region == "model":  # in layer regions the layers share one capture
        assert four[1] > two[1]


def test_layers_that_differ_are_compiled_each(monkeypatch):
    alike = compilations(monkeypatch, [6] * 3, executor="eager")
    other = compilations(monkeypatch, [6, 5, 7], executor="eager")
    assert other[0] > alike[0]
    assert alike[2] == other[2] == 0


def test_what_was_compiled_is_found_on_disk(monkeypatch):
    """Inductor's cache: another process, here another session, compiles nothing."""
    with fresh_cache(), inductor_config.patch(fx_graph_cache=True):
        counters.clear()
        first = compilations(monkeypatch, [6, 6], executor="inductor")
        missed = counters["inductor"]["fxgraph_cache_miss"]
        assert (missed, counters["inductor"]["fxgraph_cache_bypass"]) == (first[2], 0)
        counters.clear()
        assert compilations(monkeypatch, [6, 6], executor="inductor") == first  # exact again
        assert counters["inductor"]["fxgraph_cache_hit"] == first[2]
        assert not counters["inductor"]["fxgraph_cache_miss"]
