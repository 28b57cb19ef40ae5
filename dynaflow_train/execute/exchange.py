"""Collectives made of plain copies out of the other ranks' memory: they leave the SMs to compute.

Every rank puts its operand where the others can read it, all meet, and each pulls what it needs
(the copy engines of a GPU do that) and adds. On one host, for any number of ranks: two of them pull
the other's whole operand; of an all-reduce of more, each first reduces its share ("two-shot").
Between two ranks the addition can be left to the one op that reads the sum (`Exchange.reader`).

A `Ring` is such memory, for one lane: some buffers that collectives use in turn. A buffer may be
written again once its rank has met the others at a later collective, for they have then pulled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dynaflow_train.execute.collectives import resolve

if TYPE_CHECKING:
    from dynaflow_train.execute.collectives import Collective
    from dynaflow_train.execute.compile import Function
    from dynaflow_train.execute.meta import Meta
    from dynaflow_train.execute.specialise import Sizes
    from dynaflow_train.ir import Op, Plan, Region

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Connect = Callable[[str, str, int, int], "Ring | None"]
ALIGNED = 512  # bytes
LEAST = 2  # buffers: one is written while the other is pulled


class _Passed:
    """An event of the CPU, where what was computed is done."""

    def record(self) -> None:
        """Nothing to note."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Ring:
    """Memory of all ranks of a group, as this one sees it.

    Attributes:
        rank: this one among them.
        buffers: by rank, bytes [number of buffers, size of one].
        meet: returns when all ranks have called it and what they wrote before can be read; on CUDA
            it does so in the current stream.
        chunks: in as many parts between two ranks, each exchanged while the next is computed.
        event: makes what one lane records and another waits for.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    meet: Callable[[], None]
    chunks: int = 1
    event: Callable[[], Any] = _Passed

    def view(self, rank: int, number: int, meta: Meta) -> Tensor:
        """A rank's buffer as a tensor."""
        memory = self.buffers[rank][number, : meta.nbytes].view(meta.dtype)
        return memory.view(meta.shape)

    def collective(
        self, kind: Kind | Literal["pull"], number: int, meta: Meta, *, last: bool
    ) -> Collective:
        """`launch(input, output, asynchronous)` with the operand in buffer `number`.

        Args:
            kind: what to do; reductions add up, "pull" brings the other rank's operand only.
            number: of the buffer, in which the operand is when it is launched.
            meta: of the operand, contiguous.
            last: nobody meets again before the buffers are written anew: meet once more at the end.
        """
        seen = [self.view(rank, number, meta) for rank in range(len(self.buffers))]
        pull = {
            "all_reduce": _exchange_and_add if len(seen) == 2 else _reduce_shares,
            "all_gather": _gather,
            "reduce_scatter": _reduce_own,
            "pull": _pull,
        }[kind]

        def launch(_: Tensor, out: Tensor, __: bool) -> None:
            self.meet()
            pull(self, seen, out)
            if last:
                self.meet()

        return launch

    def in_chunks(
        self, number: int, meta: Meta, *, add: bool, last: bool
    ) -> tuple[Function, Collective]:
        """A product made in parts by one lane, and the all-reduce that follows it on another.

        Returns:
            `compute([left, right, out])`, where `out` is buffer `number`, and `launch` as
            `collective` gives it, for two ranks; it adds this rank's operand if `add`.
        """
        events = [self.event() for _ in range(self.chunks)]
        own, other = (self._rows(self.view(rank, number, meta)) for rank in self._both)

        def compute(given: list[Tensor]) -> tuple[Tensor, ...]:
            left, right, out = given
            for event, rows, into in zip(events, self._rows(left), self._rows(out), strict=True):
                torch.mm(rows, right, out=into)
                event.record()
            given.clear()
            return ()

        def launch(_: Tensor, out: Tensor, __: bool) -> None:
            for event, into, mine, pulled in zip(events, self._rows(out), own, other, strict=True):
                event.wait()
                self.meet()
                into.copy_(pulled)
                if add:
                    into.add_(mine)
            if last:
                self.meet()

        return compute, launch

    @property
    def _both(self) -> tuple[int, int]:
        return self.rank, 1 - self.rank

    def _rows(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.view(-1, tensor.shape[-1]).tensor_split(self.chunks)


def _others(ring: Ring) -> list[int]:
    """The next rank first, so that not all read from one."""
    number = len(ring.buffers)
    return [(ring.rank + k) % number for k in range(1, number)]


def _pull(ring: Ring, seen: list[Tensor], out: Tensor) -> None:
    out.copy_(seen[1 - ring.rank])


def _exchange_and_add(ring: Ring, seen: list[Tensor], out: Tensor) -> None:
    _pull(ring, seen, out)
    out.add_(seen[ring.rank])


def _reduce(ring: Ring, shares: list[Tensor], out: Tensor) -> None:
    """The sum of all ranks' shares, in the order of ranks, so that it does not depend on whose."""
    pulled = {rank: torch.empty_like(out) for rank in _others(ring)}
    for rank, into in pulled.items():
        into.copy_(shares[rank])
    pulled[ring.rank] = shares[ring.rank]
    out.copy_(pulled[0])
    for rank in range(1, len(shares)):
        out.add_(pulled[rank])


def _reduce_own(ring: Ring, seen: list[Tensor], out: Tensor) -> None:
    _reduce(ring, [each.chunk(len(seen))[ring.rank] for each in seen], out)


def _reduce_shares(ring: Ring, seen: list[Tensor], out: Tensor) -> None:
    """Each reduces its share, where nobody else reads its operand, then pulls the others'."""
    shares = [each.view(-1).tensor_split(len(seen)) for each in seen]
    outs = out.view(-1).tensor_split(len(seen))
    own = shares[ring.rank][ring.rank]
    _reduce(ring, [each[ring.rank] for each in shares], outs[ring.rank])
    own.copy_(outs[ring.rank])
    ring.meet()
    for rank in _others(ring):
        outs[rank].copy_(shares[rank][rank])


def _gather(ring: Ring, seen: list[Tensor], out: Tensor) -> None:
    outs = out.chunk(len(seen))
    for rank in (*_others(ring), ring.rank):
        outs[rank].copy_(seen[rank])


@dataclass(frozen=True)
class Exchange:
    """How one launch of a plan is exchanged.

    Attributes:
        kind: of the collective.
        ring: its lane's.
        number: its buffer.
        last: whether it is the last on its ring.
        after: launches after which the buffer may be written: a later meeting than that of who had
            it before, and who read from it on this rank.
        reader: the launch that alone reads an all-reduce's result and adds this rank's operand, in
            the buffer, to the other's; None where the exchange adds.
    """

    kind: Kind
    ring: Ring
    number: int
    last: bool
    after: tuple[int, ...]
    reader: int | None

    @property
    def reduces_two(self) -> bool:
        """Whether it is an all-reduce between two ranks."""
        return self.kind == "all_reduce" and len(self.ring.buffers) == 2


def kind_of(op: Op) -> Kind | None:
    """What copies can do in its place, or None."""
    if op.collective not in ("all_reduce", "all_gather", "reduce_scatter") or op.graph is None:
        return None
    node = next(n for n in op.graph.graph.nodes if n.op == "call_function")
    if op.collective != "all_gather" and node.args[1] != "sum":
        return None
    return op.collective


def exchanges(
    region: Region, plan: Plan, connect: Connect, sizes: Callable[[int], Sizes]
) -> dict[int, Exchange]:
    """Launch -> how it is exchanged, for those that can be.

    Args:
        region: ops and values.
        plan: what runs when.
        connect: (group, lane, number of buffers, bytes of one) -> ring, or None.
        sizes: launch -> the sizes of its micro-batches.
    """
    lanes: dict[tuple[str, str], list[int]] = {}
    for at, launch in enumerate(plan.launches):
        op = region.op[launch.ops[0]]
        if launch.kernel is None and op.group is not None and kind_of(op) is not None:
            lanes.setdefault((op.group, launch.stream), []).append(at)
    found: dict[int, Exchange] = {}
    for (group, lane), launches in lanes.items():
        readers = [_adds_itself(region, plan, at) for at in launches]
        depth = _depth(launches, readers, [_written(region, plan, at) for at in launches])
        size = max(_nbytes(region.op[plan.launches[at].ops[0]], sizes(at)) for at in launches)
        ring = connect(group, lane, depth, -(-size // ALIGNED) * ALIGNED)
        if ring is None:
            continue
        for k, at in enumerate(launches):
            kind = kind_of(region.op[plan.launches[at].ops[0]])
            assert kind is not None
            before = (launches[k - depth + 1], readers[k - depth]) if k >= depth else ()
            after = tuple(launch for launch in before if launch is not None)
            found[at] = Exchange(kind, ring, k % depth, at == launches[-1], after, readers[k])
    return found


def _written(region: Region, plan: Plan, at: int) -> int:
    """The first launch that makes a part of what the launch reads."""
    reader = region.op[plan.launches[at].ops[0]]
    wanted = set(plan.launches[at].micro_batches)
    for place, launch in enumerate(plan.launches[:at]):
        ops = [region.op[name] for name in launch.ops]
        alike = reader.merged or ops[0].merged or wanted & set(launch.micro_batches)
        if alike and any(reader.inputs[0] in op.outputs for op in ops):
            return place
    return at


def _adds_itself(region: Region, plan: Plan, at: int) -> int | None:
    """The launch that alone reads what an all-reduce of two ranks gives, just as it is given."""
    launch = plan.launches[at]
    op = region.op[launch.ops[0]]
    value, all_parts = op.outputs[0], tuple(range(len(plan.sizes)))
    group_of_two = op.group is not None and resolve(op.group).size() == 2
    given = region.values[value].sharing != "partial" and value not in region.outputs
    if kind_of(op) != "all_reduce" or not (group_of_two and given):
        return None

    def parts(at: int, op: Op) -> tuple[int, ...]:
        return all_parts if op.merged else plan.launches[at].micro_batches

    made = parts(at, op)
    readers = [
        (place, region.op[name])
        for place, other in enumerate(plan.launches)
        for name in other.ops
        if value in region.op[name].inputs and set(made) & set(parts(place, region.op[name]))
    ]
    if len(readers) != 1:
        return None
    [(place, reader)] = readers
    plain = plan.launches[place].kernel is None and not reader.is_communication
    return place if plain and parts(place, reader) == made else None


def _depth(launches: list[int], readers: list[int | None], written: list[int]) -> int:
    """Buffers needed for each to be written when all that it waits for was issued."""
    for depth in range(LEAST, len(launches)):
        free = [
            max(launches[k - depth + 1], readers[k - depth] or 0)
            for k in range(depth, len(launches))
        ]
        if all(a < b for a, b in zip(free, written[depth:], strict=True)):
            return depth
    return max(LEAST, len(launches))


def _nbytes(op: Op, sizes: Sizes) -> int:
    assert op.graph is not None
    places = (n.meta["val"] for n in op.graph.graph.nodes if n.op == "placeholder")
    operand: Any = next(v for v in places if isinstance(v, Tensor))
    shape = [sizes.number(size, size=True) for size in operand.shape]
    return math.prod(shape) * operand.element_size()
