"""Results that an op writes where they belong, or adds to what is there, and what that copies."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from dynaflow_train.execute.compile import OpCompiler
from dynaflow_train.execute.meta import Meta
from dynaflow_train.execute.specialise import Sizes
from dynaflow_train.ir import Op
from tests.engine.harness import Cut, Oracle, batch, compiled
from tests.engine.stepping import step
from tests.engine.zoo import SPLIT, Case

PLAIN = Sizes({}, {}, lambda node: False)


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w


def of_transposed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w.t() @ x.t()


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w, beta=0.5)


def viewed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ w).view(2, 3, 6).view(3, 2, 6)


def batched(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(x.view(2, 3, 6), w.expand(2, 6, 6))


def read_again(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, y.sin()


def returned_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, y


def cast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ w).double()


def pointwise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def reduction(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.sum(0)


def given(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.view(2, 3, 6)


# What -> whether it is copied into a slice after it was computed: by Inductor, by eager operators.
COPIES = {
    product: (False, False),
    of_transposed: (False, False),
    biased: (False, False),
    scaled: (True, False),
    viewed: (False, False),
    batched: (False, False),
    read_again: (True, True),
    returned_twice: (True, True),
    cast: (False, True),
    pointwise: (False, False),
    reduction: (False, False),
    given: (True, True),
}


def run_into(function, executor, *, add: bool, strided: bool = False):
    """The first output written into memory of ones: (what came out, wanted, copied outputs)."""
    inputs = [torch.randn(6, 6) for _ in range(3)]
    wanted = function(*inputs)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")
    graph = traced(*inputs)
    end = graph.graph.output_node()
    end.args = (tuple(end.args[0]) if isinstance(end.args[0], list | tuple) else (end.args[0],),)
    op = Op("op", "compute", ("x", "w", "b"), tuple(map(str, range(len(wanted)))), graph=graph)
    shape = list(wanted[0].shape)
    room = torch.ones(*shape[:-1], shape[-1] * (2 if strided else 1), dtype=wanted[0].dtype)
    into = room.narrow(-1, 0, shape[-1])
    compiled_op = OpCompiler(executor).compile(
        op, [Meta.of(i) for i in inputs], PLAIN, {0: Meta.of(into)}, (0,) if add else ()
    )
    rest = compiled_op.call([*inputs, into])
    if add:
        wanted[0] = wanted[0] + 1
    return [into, *rest], wanted, compiled_op.copied


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("add", [False, True], ids=["over", "added"])
@pytest.mark.parametrize("function", COPIES, ids=lambda f: f.__name__)
def test_an_output_is_written_into_its_place(function, add, executor):
    found, wanted, copied = run_into(function, executor, add=add)
    torch.testing.assert_close(found, wanted)
    copies = COPIES[function][executor == "eager"] and not add
    assert copied == ({0} if copies else set())


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_product_of_bf16_is_added_to_fp32_unrounded(executor):
    wide = [torch.randn(6, 6).bfloat16() for _ in range(3)]
    graph = make_fx(lambda x, w, b: (x @ w,), tracing_mode="fake")(*wide)
    into, wanted = torch.ones(6, 6), wide[0].float() @ wide[1].float() + 1
    op = Op("op", "compute", ("x", "w", "b"), ("0",), graph=graph)
    metas = [Meta.of(each) for each in wide]
    added = OpCompiler(executor).compile(op, metas, PLAIN, {0: Meta.of(into)}, (0,))
    added.call([*wide, into])
    torch.testing.assert_close(into, wanted, rtol=1e-6, atol=1e-6)


def test_a_product_is_copied_into_a_slice_whose_rows_stand_apart():
    found, wanted, copied = run_into(product, "inductor", add=False, strided=True)
    torch.testing.assert_close(found, wanted)
    assert copied == {0}


def kernels(case: Case, *parts: int) -> int:
    """How many kernels of Inductor's own a step runs."""
    torch._dynamo.reset()
    model, inputs = compiled(case, Cut(parts), executor="inductor"), batch(case, 4)
    Oracle(case, 4, torch.float32).check(step(model, inputs))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        step(model, inputs)
    assert not any(used.copies for used in df.plans(model))
    return sum("cpp_fused" in event.name for event in seen.events())


@pytest.mark.parametrize("name", ["mlp", "block"])
def test_no_kernel_only_copies(name):
    """Each micro-batch runs the kernels of the whole batch; one that copies would come on top."""
    with inductor_config.patch({"cpp.enable_kernel_profile": True, "fx_graph_cache": False}):
        whole, halves = kernels(SPLIT[name], 4), kernels(SPLIT[name], 2, 2)
    assert 0 < halves <= 2 * whole


def test_gradients_of_parameters_are_added_by_what_computes_them():
    """Not by additions of their own, each of which would read and write a whole gradient twice."""
    model = compiled(SPLIT["block"], Cut(3), executor="eager")
    step(model, batch(SPLIT["block"], 4))
    (backward,) = [used for used in df.plans(model) if used.region.phase == "backward"]
    assert backward.source is not None
    assert ".add_(" not in backward.source
    assert " + s" not in backward.source
