"""Region "model" in groups of layers: captures are shared, gradients are final group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaflow_train as df
from dynaflow_train.api import sessions
from dynaflow_train.dispatch import Dispatcher, groups_of
from tests.engine.harness import Cut, Oracle, batch, compiled
from tests.engine.parallel import Stack
from tests.engine.stepping import step
from tests.engine.test_compile_once import Layer
from tests.engine.zoo import Case, rows

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's look


class PerLayer(Cut):
    """Each layer an op, two equal micro-batches."""

    rules = (df.SplitModule(Layer, optional=True),)


def grouped(layers: int, size: int) -> tuple[Case, Any]:
    case = Case(lambda: Stack(*(Layer() for _ in range(layers))), rows(3, 6))
    model = compiled(case, PerLayer(2), executor="eager", region="model", layers_per_region=size)
    return case, model


@pytest.mark.parametrize(
    ("layers", "size", "captures"), [(4, 2, 1), (5, 2, 2), (3, 1, 1), (3, 4, 1), (3, 0, 1)]
)
def test_equal_groups_share_a_capture(layers, size, captures):
    case, model = grouped(layers, size)
    Oracle(case, 4, torch.float32).check(step(model, batch(case, 4)), "grouped")
    (session,) = sessions(model)
    assert len(session.captures) == captures
    assert {used.plan.sizes for used in df.plans(model)} == {(2, 2)}
    names = {used.region.name for used in df.plans(model)}
    assert all(name.endswith(".*") == (0 < size < layers) for name in names), names


def test_gradients_of_a_group_are_final_before_the_next_ones_backward_runs():
    """What data parallelism needs: each parameter's hook fires once, beside the backward."""
    case, model = grouped(6, 2)
    step(model, batch(case, 4))
    model.zero_grad(set_to_none=True)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    order: list[Any] = []
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=number: order.append(n // 2))
    for number, group in enumerate(groups_of(layers, 2)):
        first: Any = group[0]._compiled_call_impl
        assert isinstance(first, Dispatcher)

        def run(*args: Any, plain: Any = first.run, number: int = number, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            output.grad_fn.register_prehook(lambda _: order.append(f"backward {number}"))
            return output

        first.run = run  # type: ignore[method-assign]
    step(model, batch(case, 4))
    wanted = [each for n in (2, 1, 0) for each in (f"backward {n}", *[n] * 8)]
    assert order == wanted
