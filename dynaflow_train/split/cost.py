"""How much work a node is: floating-point operations and bytes, at the traced sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry


def _hint(size: Any) -> int:
    return int(size.node.hint or 1) if isinstance(size, torch.SymInt) else int(size)


def _bytes(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(_bytes(v) for v in value)
    if isinstance(value, torch.Tensor):
        return math.prod(_hint(s) for s in value.shape) * value.dtype.itemsize
    return 0


def cost(node: fx.Node) -> tuple[int, int]:
    """(floating-point operations, bytes of the result) for the whole batch as it was traced."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) if packet is not None else None
    out = node.meta.get("val")
    if "scaled_dot_product" in str(node.target):
        return _attention(node), _bytes(out)
    if str(node.target).startswith("dynaflow.grouped_"):
        return _grouped(node), _bytes(out)
    if count is None:
        return 0, _bytes(out)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _real(n.meta.get("val")))
    return int(count(*args, **kwargs, out_val=_real(out))), _bytes(out)


def _attention(node: fx.Node) -> int:
    """Two products of [b, h, s, d] with [b, h, t, d] forward; five in the backward.

    torch's own formula refuses keys with fewer heads than queries.
    """
    tensors = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)
    ]
    large = [t for t in tensors if t.dim() == 4]
    backward = "backward" in str(node.target)
    query, key = large[1:3] if backward else large[:2]
    size = math.prod(_hint(s) for s in query.shape) * _hint(key.shape[2])
    return (10 if backward else 4) * size


def _grouped(node: fx.Node) -> int:
    """Every row meets one expert's matrix, if as many rows come as go."""
    rows, other = (n.meta["val"] for n in node.all_input_nodes[:2])
    matrix = other.shape[1:] if other.dim() == 3 else (rows.shape[1], other.shape[1])
    return 2 * math.prod(_hint(s) for s in (rows.shape[0], *matrix))


def _real(value: Any) -> Any:
    """Tensors without memory at the traced sizes: flop formulas want shapes with numbers."""
    if isinstance(value, tuple | list):
        return type(value)(_real(v) for v in value)
    if isinstance(value, torch.Tensor):
        return torch.empty([_hint(s) for s in value.shape], dtype=value.dtype, device="meta")
    return _hint(value) if isinstance(value, torch.SymInt) else value
