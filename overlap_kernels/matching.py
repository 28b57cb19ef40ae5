"""Finds in a chain's graph what a kernel stands in for, and puts it there.

What is left of the graph beside the kernel may only be views, casts and copies. A norm is
recognised by what it computes, not by how it is written: the chain runs on random numbers with its
collective left out, and each result must be one of the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from dynaflow_train.overlap_kernels.all_reduce_rms_norm import Norm, reference

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_LEFT = (
    *_VIEWS, _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.detach.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default, _aten.expand.default,
    _aten._to_copy.default, _aten.clone.default, torch.ops.prims.convert_element_type.default,
)  # fmt: skip
COLLECTIVES: dict[str, Any] = {
    "all_reduce": _c10d.all_reduce.default,
    "all_gather": _c10d.all_gather_into_tensor.default,
    "reduce_scatter": _c10d.reduce_scatter_tensor.default,
}
Function = Callable[..., tuple[Tensor, ...]]
SUM = 4  # number of the sum itself among the results of a norm's kernel


@dataclass(frozen=True)
class Found:
    """What a kernel replaces in one graph.

    Attributes:
        group: of the collective.
        arguments: nodes that the kernel is called with.
        results: node -> number of the kernel's result that takes its place.
    """

    group: str
    arguments: tuple[fx.Node, ...]
    results: Mapping[fx.Node, int]
    norm: Norm | None = None
    parameters: tuple[int | None, int | None, int | None] = (None, None, None)
    is_product: bool = False


def collective(graph: fx.Graph, kind: str) -> tuple[fx.Node, fx.Node] | str:
    """The only collective and its wait, or why not."""
    nodes = [n for n in graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]
    nodes = [n for n in nodes if n.target != _c10d.wait_tensor.default]
    if len(nodes) != 1 or nodes[0].target != COLLECTIVES[kind]:
        names = ", ".join(str(n.target) for n in nodes) or "none"
        return f"it takes a chain with one {kind}, found {names}"
    if kind != "all_gather" and nodes[0].args[1] != "sum":
        return f"it sums, the chain's {kind} is {nodes[0].args[1]!r}"
    return nodes[0], next(iter(nodes[0].users))


def any_group(graph: fx.Graph) -> str | None:
    """The group of a chain's first collective."""
    kinds = COLLECTIVES.values()
    return next((group_of(n) for n in graph.nodes if n.target in kinds), None)


def group_of(node: fx.Node) -> str:
    """A collective's group by its name; graphs may hold the object."""
    group = node.args[-1]
    return group if isinstance(group, str) else cast("Any", group).group_name


def through_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a chain of reshapes starts from, and the reshapes."""
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        node = node.all_input_nodes[0]
    return node, views


def product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors, if `node` is a product and nobody else reads it or a view of it."""
    root, views = through_views(node)
    alone = all(len(each.users) == 1 for each in (root, *views))
    if root.target != _aten.mm.default or not alone:
        return None
    left, right = cast("tuple[fx.Node, fx.Node]", root.args)
    return left, right


def substitute(graph: fx.GraphModule, found: Found, function: Function) -> fx.GraphModule | str:
    """The graph with `function` in place of what was found; or what else it computes."""
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = new.placeholder(node.name)
    call: list[fx.Node] = []
    others: set[str] = set()

    def emit(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        if node in found.results:
            if not call:
                call.append(new.call_function(function, tuple(map(emit, found.arguments))))
            shown = node.meta["val"]  # as the chain gives it: reshaped and cast
            given = (call[0], found.results[node], shown.shape, shown.dtype)
            env[node] = new.call_function(_item, given)
            return env[node]
        if node.op == "call_function" and node.target not in _LEFT:
            others.add(str(node.target))
        env[node] = new.node_copy(node, emit)
        return env[node]

    outputs = cast("tuple[fx.Node, ...]", graph.graph.output_node().args[0])
    new.output(tuple(map(emit, outputs)))
    if others:
        return f"the chain computes more than it knows: {', '.join(sorted(others))}"
    return fx.GraphModule(graph, new)


def _item(results: Sequence[Tensor], number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return results[number].to(dtype).view(shape)


def find_product(graph: fx.GraphModule, kind: str) -> Found | str:
    """A product and the collective behind it: `all_reduce` or `reduce_scatter`."""
    pair = collective(graph.graph, kind)
    if isinstance(pair, str):
        return pair
    node, wait = pair
    operand = cast("fx.Node", node.args[0])
    factors = product(operand)
    if factors is None:
        return f"what is passed to {kind} is no matrix product that it alone reads"
    rows = factors[0].meta["val"].shape[0]
    if kind == "reduce_scatter" and rows % cast("int", node.args[2]):
        return f"{rows} rows are not divisible by {node.args[2]} ranks"
    return Found(group_of(node), factors, {wait: 0})


def find_gather(graph: fx.GraphModule) -> Found | str:
    """An all-gather of rows and the one product that follows."""
    pair = collective(graph.graph, "all_gather")
    if isinstance(pair, str):
        return pair
    node, wait = pair
    products = [n for n in graph.graph.nodes if n.target == _aten.mm.default]
    if len(products) != 1 or through_views(products[0].args[0])[0] is not wait:
        return "what follows the all_gather is not one product with the gathered rows at its left"
    own = cast("fx.Node", node.args[0])
    if own.meta["val"].shape[-1] != products[0].args[0].meta["val"].shape[-1]:
        return "the product's rows are not those that were gathered"
    right = cast("fx.Node", products[0].args[1])
    return Found(group_of(node), (own, right), {products[0]: 0, wait: 1})


def find_norm(graph: fx.GraphModule, device: torch.device) -> Found | str:
    """An all-reduce, perhaps of a product, an addition and a norm."""
    pair = collective(graph.graph, "all_reduce")
    if isinstance(pair, str):
        return pair
    node, wait = pair
    operand = cast("fx.Node", node.args[0])
    after = _after(wait)
    outputs = cast("tuple[fx.Node, ...]", graph.graph.output_node().args[0])
    results = [each for each in outputs if each in after]
    sources = list(dict.fromkeys(s for n in after for s in n.all_input_nodes if s not in after))
    shape = operand.meta["val"].shape
    beside = [s for s in sources if s not in (node, wait) and s.meta["val"].shape == shape]
    vectors = [s for s in sources if s.meta["val"].numel() == shape[-1] and s not in beside]
    odd = [s.name for s in sources if s not in (node, wait, *beside, *vectors)]
    if len(beside) > 1 or len(vectors) > 2 or odd:
        return (
            f"it takes one residual and a norm's parameters behind the all_reduce, found "
            f"{len(beside) + len(vectors) + len(odd)} inputs ({', '.join(odd) or 'no others'})"
        )
    with unset_fake_temporarily(), torch.no_grad():
        rule = _recognise(graph, wait, (beside, vectors), results, device)
    if isinstance(rule, str):
        return rule
    norm, roles, vectors = rule
    factors = product(operand)
    arguments = [*(factors or (operand,)), *beside, *vectors]
    first = len(factors or (operand,))
    places = [first if beside else None]
    first += len(beside)
    places += [first if vectors else None, first + 1 if len(vectors) > 1 else None]
    return Found(
        group_of(node), tuple(arguments), roles, norm, (places[0], places[1], places[2]),
        factors is not None,
    )  # fmt: skip


def _after(wait: fx.Node) -> list[fx.Node]:
    """The wait and all that depends on it, in order."""
    after = [wait]
    for node in wait.graph.nodes:
        if node.op == "call_function" and node not in after:
            after += [node] if any(s in after for s in node.all_input_nodes) else []
    return after


def _recognise(
    graph: fx.GraphModule,
    wait: fx.Node,
    given: tuple[list[fx.Node], list[fx.Node]],
    results: list[fx.Node],
    device: torch.device,
) -> tuple[Norm, dict[fx.Node, int], list[fx.Node]] | str:
    """The norm, which result is which of the kernel's, and its parameters in their order."""
    beside, vectors = given
    source = torch.Generator(device).manual_seed(0)  # alike on all ranks
    values = {n: _random(n, source, vector=n in vectors) for n in (wait, *beside, *vectors)}
    wanted = _evaluate(wait, values, results)
    scales = sorted({a for n in graph.graph.nodes for a in n.args if isinstance(a, float)})
    kinds = [Norm("none")] if not vectors else [
        Norm(kind, eps) for eps in scales if 0 < eps < 0.1 for kind in ("rms", "layer")
    ]  # fmt: skip
    orders = [vectors, vectors[::-1]] if len(vectors) > 1 else [vectors]
    width = wait.meta["val"].shape[-1]
    for norm in kinds:
        for order in orders:
            total = values[wait].double() + (values[beside[0]].double() if beside else 0)
            total = total.to(values[wait].dtype).double()
            two = [values[v].double().view(width) for v in order]
            weight, bias = (*two, None, None)[:2]
            if bias is not None and norm.kind != "layer":
                continue
            normed = reference(total, None, weight, bias, norm)[1]
            mean = total.mean(-1) if norm.kind == "layer" else torch.zeros_like(total[..., 0])
            scale = ((total - mean[..., None]).square().mean(-1) + norm.eps).rsqrt()
            ours = {SUM: values[wait].double(), 0: total}
            ours |= {1: normed, 2: mean, 3: scale} if vectors else {}
            roles = {n: _role(value, ours) for n, value in zip(results, wanted, strict=True)}
            if all(role is not None for role in roles.values()):
                return norm, cast("dict[fx.Node, int]", roles), order
    return "the chain's results are not a sum and its RMSNorm or LayerNorm"


def _random(node: fx.Node, source: torch.Generator, *, vector: bool) -> Tensor:
    """Numbers on which sum, RMSNorm and LayerNorm differ."""
    like = node.meta["val"]
    made = torch.randn(like.shape, device=source.device, generator=source)
    made = made * (0.3 if vector else 2.0) + 1.0
    return made.to(like.dtype)


def _evaluate(wait: fx.Node, values: dict[fx.Node, Tensor], wanted: list[fx.Node]) -> list[Tensor]:
    env: dict[fx.Node, Any] = dict(values)
    for node in _after(wait)[1:]:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = cast("Any", node.target)(*args, **kwargs)
    return [env[node] for node in wanted]


def _role(value: Tensor, ours: Mapping[int, Tensor]) -> int | None:
    """Which of the kernel's results it is, up to shape and rounding."""
    for number, mine in ours.items():
        if mine.numel() == value.numel():
            off = (value.double().reshape(-1) - mine.reshape(-1)).abs().max()
            eps = max(torch.finfo(value.dtype).eps, 1e-7)
            if off <= 32 * eps * mine.abs().max().clamp_min(1e-3):
                return number
    return None
