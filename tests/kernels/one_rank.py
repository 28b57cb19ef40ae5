# ruff: noqa: T201
"""Experts on one rank, interpreted: `TRITON_INTERPRET=1 python -m tests.kernels.one_rank`."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaflow_train.overlap_kernels import experts as ex
from dynaflow_train.overlap_kernels.grouped_kernel import GroupedKernel
from tests.kernels.two_ranks import plain, with_gradients

CASES = (  # dtype, tokens, top, experts, K, width, N
    (torch.float32, 13, 3, 5, 17, 9, 33),
    (torch.float16, 6, 8, 9, 32, 16, 64),
    (torch.float32, 5, 1, 3, 8, 8, 8),
)


def chain(x, w, dy, ends):
    """Forward, dgrad and wgrad as autograd writes them, and an op beside them."""
    y = torch._grouped_mm(x, w.transpose(1, 2), ends)
    return y.relu(), torch._grouped_mm(dy, w, ends), torch._grouped_mm(dy.t(), x, ends)


def registered():
    """The registry's kernel puts ours in place of all three."""
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    shapes = (10, 16), (3, 24, 16), (10, 24)
    given = [torch.randn(shape, dtype=torch.float16) for shape in shapes]
    graph = make_fx(chain, tracing_mode="fake")(*(each.bfloat16() for each in given), ends)
    kernel = GroupedKernel(sms=2)
    assert kernel.can_run(graph) is None
    assert "no grouped product" in kernel.can_run(make_fx(torch.relu)(given[0]))
    found = kernel.bind(graph)([*given, ends])
    for ours, theirs in zip(found, chain(*given, ends), strict=True):
        torch.testing.assert_close(ours, theirs)


def main():
    registered()
    for place, (kind, tokens, top, experts, k, width, n) in enumerate(CASES):
        torch.manual_seed(place)
        chosen = [torch.randperm(experts - 1)[:top] for _ in range(tokens)]  # the last: no token
        chosen = torch.stack(chosen)[None]
        w1 = (torch.randn(experts, width, k) / k**0.5).to(kind).mT
        w2 = (torch.randn(experts, n, width) / width**0.5).to(kind).mT
        leaves = torch.randn(1, tokens, k).to(kind), w1, w2, torch.rand(1, tokens, top)
        dout, routing = torch.randn(1, tokens, n).to(kind), ex.route(chosen, experts)

        def layer(x, w1, w2, weights, routing=routing):
            hidden = torch.nn.functional.silu(ex.dispatch_matmul(x[0], w1, routing))
            return ex.combine_matmul(hidden, w2, weights, routing)[None]

        def reference(*each, chosen=chosen):
            return plain(*each, chosen)

        found, own = (with_gradients(each, leaves, dout) for each in (layer, reference))
        truth = with_gradients(reference, [leaf.double() for leaf in leaves], dout.double())
        for name, ours, theirs, exact in zip(
            ("out", "dx", "dw1", "dw2", "dweights"), found, own, truth, strict=True
        ):
            norm, slack = exact.norm(), 2.0 if kind == torch.float16 else 4.0
            error, least = ((one - exact).norm() / norm for one in (ours, theirs))
            floor = torch.finfo(kind).eps * (3 if kind == torch.float32 else 1 / 16)
            print(f"case {place} {name}: error {error:.2e}, torch {least:.2e}", flush=True)
            assert error <= slack * least + floor, name
        assert not found[2][-1].any(), "an expert without tokens has a gradient"


if __name__ == "__main__":
    main()
