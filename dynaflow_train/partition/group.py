"""Groups nodes that bear one label into ops without making a cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import fx


def group(
    nodes: list[fx.Node],
    label: Callable[[fx.Node], Hashable],
    sources: Callable[[fx.Node], list[fx.Node]],
) -> list[list[fx.Node]]:
    """Ops as lists of nodes, in a legal order.

    A node joins the youngest op of its label unless one of its inputs depends on that op by way of
    another; then it opens a new op. Ancestors are kept as bit sets, one integer an op.

    Args:
        nodes: in topological order.
        label: nodes of one label may share an op; None never shares.
        sources: the nodes among `nodes` that a node reads, seen through views.
    """
    ops: list[list[fx.Node]] = []
    above: list[int] = []  # op -> bit set of the ops it depends on
    home: dict[fx.Node, int] = {}
    youngest: dict[Hashable, int] = {}
    for node in nodes:
        key, reads = label(node), {home[s] for s in sources(node)}
        op = youngest.get(key) if key is not None else None
        if op is not None and any(other != op and above[other] >> op & 1 for other in reads):
            op = None
        if op is None:
            op = len(ops)
            ops.append([])
            above.append(0)
            youngest[key] = op
        new = 0
        for other in reads - {op}:
            new |= above[other] | 1 << other
        if new & ~above[op]:
            for low in range(op, len(ops)):  # those that depend on this op inherit
                if low == op or above[low] >> op & 1:
                    above[low] |= new
            # An op may inherit from one that stands later; its own number stays its name.
            for low in range(op):
                if above[low] >> op & 1:
                    above[low] |= new
        ops[op].append(node)
        home[node] = op
    return _ordered(ops, above)


def _ordered(ops: list[list[fx.Node]], above: list[int]) -> list[list[fx.Node]]:
    """Topological order; among ready ops the one whose first node stood first."""
    left, done, order = list(range(len(ops))), 0, []
    while left:
        ready = next(i for i in left if not above[i] & ~done)
        left.remove(ready)
        done |= 1 << ready
        order.append(ops[ready])
    return order
