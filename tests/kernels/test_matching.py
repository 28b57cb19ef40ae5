"""What a dense kernel stands in for, and what may stay beside it."""

from __future__ import annotations

import torch
from torch import fx

from dynaflow_train.overlap_kernels import matching

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def chain(last):
    """A product, its reduce-scatter over two ranks, and one more operator on the transposed sum."""
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    product = graph.call_function(aten.mm.default, (left, right))
    sent = graph.call_function(c10d.reduce_scatter_tensor.default, (product, "sum", 2, "group"))
    got = graph.call_function(c10d.wait_tensor.default, (sent,))
    turned = graph.call_function(aten.t.default, (got,))
    graph.output((graph.call_function(last, (turned,)),))
    for node, shape in ((left, (6, 4)), (right, (4, 5)), (product, (6, 5)), (got, (3, 5))):
        node.meta["val"] = torch.empty(shape)
    return fx.GraphModule({}, graph)


def test_copies_stay_beside_the_kernel():
    graph = chain(aten.clone.default)
    found = matching.find_product(graph, "reduce_scatter")
    assert isinstance(found, matching.Found)
    made = matching.substitute(graph, found, lambda x, w: ((x @ w)[:3],))
    left, right = torch.randn(6, 4), torch.randn(4, 5)
    (got,) = made(left, right)
    torch.testing.assert_close(got, (left @ right)[:3].t(), rtol=0, atol=0)


def test_what_computes_does_not():
    graph = chain(aten.relu.default)
    found = matching.find_product(graph, "reduce_scatter")
    assert "more than it knows: aten.relu" in matching.substitute(graph, found, lambda x, w: ())
