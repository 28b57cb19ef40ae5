"""Room for several micro-batches among the tensors that a forward saves for its backward.

AOTAutograd fixes how many tensors the forward saves. A saved tensor that each micro-batch makes for
itself gets one slot per micro-batch up to a maximum; slots that a call does not use hold empty
tensors. One more saved value, a ticket (int64 scalar on the CPU), says which plan the forward ran,
so that several forwards with different splits may be pending and each backward knows its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class Slots:
    """Where saved values stand in the forward's outputs and in the backward's inputs.

    Attributes:
        num_outputs: the forward's own outputs, which come first.
        saved: forward nodes of the saved tensors, in order.
        slotted: those of them with `count` slots.
        count: slots per slotted tensor, the greatest number of micro-batches.
        others: saved values that are no tensors (sizes, opaque objects), in the forward's order.
    """

    num_outputs: int
    saved: tuple[str, ...]
    slotted: tuple[str, ...]
    count: int
    others: tuple[str, ...]

    @property
    def ticketed(self) -> bool:
        """Whether a ticket is saved."""
        return self.count > 1 and bool(self.saved)


def add_slots(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    slotted: Collection[fx.Node],
    count: int,
) -> Slots:
    """Widen both graphs in place. Forward: outputs | saved | slots 1.. | ticket | others.

    Args:
        forward: as AOTAutograd's partition made it.
        backward: likewise.
        num_outputs: how many of the forward's outputs are not saved values.
        slotted: saved forward nodes of which every micro-batch has its own.
        count: slots for each.
    """
    out = forward.graph.output_node()
    outputs: list[Any] = list(cast("Any", out.args[0]))
    saved = [n for n in outputs[num_outputs:] if isinstance(n.meta.get("val"), torch.Tensor)]
    others = outputs[num_outputs + len(saved) :]
    assert outputs[num_outputs : num_outputs + len(saved)] == saved, "tensors come first"
    chosen = [n for n in saved if n in slotted and n.op != "placeholder"]
    slots = Slots(
        num_outputs,
        tuple(n.name for n in saved),
        tuple(n.name for n in chosen),
        count,
        tuple(n.name for n in others),
    )
    if not slots.ticketed:
        return slots
    extra: list[fx.Node] = []
    with forward.graph.inserting_before(out):
        for node in chosen:
            for _ in range(1, count):
                copy = forward.graph.call_function(torch.ops.aten.alias.default, (node,))
                copy.meta = dict(node.meta)
                extra.append(copy)
        ticket = forward.graph.call_function(
            torch.ops.aten.full.default, ([], 0), {"dtype": torch.int64, "device": "cpu"}
        )
        fake_mode = next(n.meta["val"].fake_mode for n in saved)
        with fake_mode:
            ticket.meta["val"] = torch.empty((), dtype=torch.int64, device="cpu")
        extra.append(ticket)
    out.args = ((*outputs[:num_outputs], *saved, *extra, *others),)
    if "desc" in out.meta:
        desc, at = list(out.meta["desc"]), num_outputs + len(saved)
        out.meta["desc"] = [*desc[:at], *[None] * len(extra), *desc[at:]]
    forward.recompile()
    _widen_backward(backward, slots, [n.meta for n in extra])
    return slots


def _widen_backward(backward: fx.GraphModule, slots: Slots, metas: list[dict]) -> None:
    """Backward placeholders: sizes | saved tensors | slots | ticket | opaque | tangents."""
    inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
    num_sizes = sum(1 for n in inputs if isinstance(n.meta.get("val"), torch.SymInt))
    after = inputs[num_sizes + len(slots.saved) - 1]
    for index, meta in enumerate(metas):
        with backward.graph.inserting_after(after):
            after = backward.graph.placeholder(f"dynaflow_slot_{index}")
            after.meta = {"val": meta["val"]}
    backward.recompile()
