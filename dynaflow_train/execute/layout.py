"""Which values need a buffer that holds all micro-batches, so that merging them costs no copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynaflow_train.ir import Plan, Region

Span = tuple[int, int]  # micro-batches from, up to


@dataclass
class Layout:
    """How the values of a region are held under one plan.

    Attributes:
        made: value -> the spans in which it is made (or given).
        read: value -> the spans in which it is read.
        merged: values made in parts and read in larger pieces: they get a buffer.
        summed: partial values that are read whole.
        readers: value -> positions of the launches that read it.
    """

    made: dict[str, list[Span]] = field(default_factory=dict)
    read: dict[str, set[Span]] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)
    readers: dict[str, list[int]] = field(default_factory=dict)


def span_of(micro_batches: tuple[int, ...]) -> Span:
    """The span of adjacent micro-batches."""
    return (micro_batches[0], micro_batches[-1] + 1)


def lay_out(
    region: Region, plan: Plan, given: Mapping[str, tuple[Span, ...]], whole_results: set[str]
) -> Layout:
    """Decide for every value.

    Args:
        region: ops and values.
        plan: what runs when.
        given: inputs that come in parts (saved by a forward), with their spans.
        whole_results: values that leave the region in one piece.
    """
    everything = (0, len(plan.sizes))
    layout = Layout()
    for name in region.inputs:
        layout.made[name] = list(given.get(name, (everything,)))
    for position, launch in enumerate(plan.launches):
        produced = {v for name in launch.ops for v in region.op[name].outputs}
        for name in launch.ops:
            op = region.op[name]
            span = everything if op.merged else span_of(launch.micro_batches)
            for value in op.inputs:
                if value in produced and len(launch.ops) > 1:
                    continue
                layout.read.setdefault(value, set()).add(_wanted(region, value, span, everything))
                layout.readers.setdefault(value, []).append(position)
            for value in op.outputs:
                layout.made.setdefault(value, []).append(span)
    for value in whole_results:
        layout.read.setdefault(value, set()).add(everything)
    _join(layout, region, everything)
    return layout


def _join(layout: Layout, region: Region, everything: Span) -> None:
    """What is read in larger pieces than it is made."""
    for value, spans in layout.read.items():
        made, sharing = layout.made[value], region.values[value].sharing
        if sharing == "partial" and len(made) > 1 and everything in spans:
            layout.summed.add(value)
        elif sharing == "batch" and any(_touches_several(span, made) for span in spans):
            layout.merged.add(value)


def _wanted(region: Region, value: str, span: Span, everything: Span) -> Span:
    return everything if region.values[value].sharing == "shared" else span


def _touches_several(span: Span, made: list[Span]) -> bool:
    """Whether a read of `span` touches more than one of the pieces made."""
    return sum(a < span[1] and span[0] < b for a, b in made) > 1
