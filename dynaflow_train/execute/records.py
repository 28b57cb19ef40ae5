"""What forwards leave for their backwards, by the ticket among the saved tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynaflow_train.execute.graphs import Recordings
    from dynaflow_train.execute.layout import Span
    from dynaflow_train.execute.meta import Meta
    from dynaflow_train.ir import Plan

MOST_PENDING = 64  # forwards that may wait for their backward while others make new plans


@dataclass(frozen=True)
class Record:
    """What a backward has to know of its forward: the plan, and how saved values were left.

    Attributes:
        plan: the forward's.
        spans, metas: of each saved value: which micro-batches its pieces hold, and their layout.
        context, candidate: where several strategies are tried: sizes, and which of them it was.
        base: ticket of the plan: its own, or for a recorded forward that of the plain one.
        recorded: the forward was replayed: what it saved stands where it always stands.
    """

    plan: Plan
    spans: Mapping[str, tuple[Span, ...]]
    metas: Mapping[tuple[str, int], Meta]
    context: tuple[Any, ...] = ()
    candidate: int = 0
    base: int = -1
    recorded: bool = False


class Records(dict[int, Record]):
    """Records by ticket, shared by the runners of one capture.

    Attributes:
        live: tickets of contexts that may run again.
        followers: ticket of a recorded forward -> recordings of its backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.followers: dict[int, Recordings] = {}

    def new(self) -> int:
        """A ticket."""
        return max(self, default=-1) + 1

    def drop(self, ticket: int) -> None:
        """The recording of this forward is gone: its backward reads memory that is gone, too."""
        self.live.discard(ticket)
        if ticket in self.followers:
            self.followers.pop(ticket).drop(ticket)

    def forget(self) -> None:
        """Drop the oldest records, but for those of contexts that may run again."""
        for number in [n for n in list(self)[:-MOST_PENDING] if n not in self.live]:
            del self[number]
