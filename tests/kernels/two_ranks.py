# ruff: noqa: T201
"""Experts on two ranks, interpreted: two processes, memory that both map, one late, at last gone.

TRITON_INTERPRET=1 python -m tests.kernels.two_ranks fp32 20 2 4 40 24 72
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.multiprocessing as mp

from dynaflow_train.overlap_kernels import experts as ex

WORLD, BYTES, SLOTS = 2, 1 << 16, 16


@dataclass(frozen=True)
class Mapped:
    """What `experts.Shared` asks for, over files."""

    rank: int
    buffers: tuple
    flags: tuple
    tables: torch.Tensor
    epochs: torch.Tensor
    state: torch.Tensor
    host: torch.Tensor
    limit: int = 50_000
    alone: bool = False

    def meet(self):
        if self.alone:
            return
        time.sleep(0.05 * (self.rank == int(self.epochs[0]) % WORLD))
        epoch = int(self.epochs[SLOTS - 1]) + 1
        self.epochs[SLOTS - 1] = epoch
        for flags in self.flags:
            flags[self.rank, SLOTS - 1] = epoch
        while not all(int(flag) >= epoch for flag in self.flags[self.rank][:, SLOTS - 1]):
            time.sleep(0)


def mapped(rank, folder, limit):
    size = BYTES + WORLD * SLOTS * 4
    memory = [
        torch.from_file(f"{folder}/{each}", shared=True, size=size, dtype=torch.uint8)
        for each in range(WORLD)
    ]
    buffers = tuple(each[:BYTES] for each in memory)
    flags = tuple(each[BYTES:].view(torch.int32).view(WORLD, SLOTS) for each in memory)
    tables = torch.tensor([[each.data_ptr() for each in some] for some in (buffers, flags)])
    return Mapped(
        rank, buffers, flags, tables, *(torch.zeros(n, dtype=torch.int32) for n in (SLOTS, 1, 1)),
        limit=limit,
    )  # fmt: skip


def made(numbers, kind, seed):
    """All ranks' operands: x, w1, w2, weights, chosen, dout."""
    tokens, top, local, k, width, n = numbers
    torch.manual_seed(seed)
    experts = WORLD * local
    allowed = experts - 1 if experts > top else experts  # one expert without a token
    chosen = [torch.randperm(allowed)[:top] for _ in range(WORLD * tokens)]
    x = torch.randn(WORLD, tokens, k, dtype=kind)
    w1 = (torch.randn(experts, width, k) / k**0.5).to(kind).mT
    w2 = (torch.randn(experts, n, width) / width**0.5).to(kind).mT
    weights = torch.rand(WORLD, tokens, top)
    dout = torch.randn(WORLD, tokens, n, dtype=kind)
    return x, w1, w2, weights, torch.stack(chosen).view(WORLD, tokens, top), dout


def plain(x, w1, w2, weights, chosen):
    """The layer without any routing: every expert for every token, the unchosen times zero."""
    every = torch.einsum("rtk,ekw->rtew", x, w1)
    every = torch.einsum("rtew,ewn->rten", torch.nn.functional.silu(every), w2)
    taken = every.gather(2, chosen[..., None].expand(*chosen.shape, every.shape[-1]))
    return (taken.float() if x.dtype == torch.float16 else taken).mul(weights[..., None]).sum(2)


def with_gradients(function, leaves, dout):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves).to(dout.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_rank(rank, folder, kind, numbers):
    torch.set_num_threads(1)
    space, local = mapped(rank, folder, 50_000), numbers[2]
    mine = slice(rank * local, (rank + 1) * local)
    for seed in range(2):
        x, w1, w2, weights, chosen, dout = made(numbers, kind, seed)
        routing = ex.route(chosen, local, rank)

        def layer(x, w1, w2, weights, routing=routing):
            hidden = torch.nn.functional.silu(ex.dispatch_matmul(x, w1, routing, space))
            return ex.combine_matmul(hidden, w2, weights, routing, space)

        found = with_gradients(layer, (x[rank], w1[mine], w2[mine], weights), dout[rank])
        if not seed:
            again = with_gradients(layer, (x[rank], w1[mine], w2[mine], weights), dout[rank])
            same = [torch.equal(a, b) for a, b in zip(found, again, strict=True)]
            assert all(same), "not repeatable"
        leaves, wide = (x, w1, w2, weights), torch.float64
        truth = with_gradients(
            lambda *each, chosen=chosen: plain(*each, chosen),
            [leaf.to(wide) for leaf in leaves], dout.to(wide),
        )  # fmt: skip
        own = with_gradients(lambda *each, chosen=chosen: plain(*each, chosen), leaves, dout)
        here = (chosen >= mine.start) & (chosen < mine.stop)
        part = [rank, rank, mine, mine, here]
        for name, ours, theirs, exact, at in zip(
            ("out", "dx", "dw1", "dw2", "dweights"), found, own, truth, part, strict=True
        ):
            ours = ours[here] if name == "dweights" else ours
            norm, slack = exact[at].norm(), 2.0 if kind == torch.float16 else 4.0
            error, least = ((one - exact[at]).norm() / norm for one in (ours, theirs[at]))
            print(f"rank {rank} {name}: error {error:.2e}, torch {least:.2e}", flush=True)
            assert error <= slack * least, name
    assert not int(space.host)
    deserted(rank, replace(space, limit=100), kind, numbers)


def deserted(rank, space, kind, numbers):
    """Rank 1 stops before it combines: rank 0 gives up, and says for whom it waited."""
    _, _, w2, weights, chosen, _ = made(numbers, kind, 0)
    mine = slice(rank * numbers[2], (rank + 1) * numbers[2])
    routing = ex.route(chosen, numbers[2], rank)
    space.meet()
    if not rank:
        hidden = torch.zeros(chosen.numel(), w2.shape[1], dtype=kind)
        ex.combine_matmul(hidden, w2[mine], weights, routing, replace(space, alone=True))
        assert int(space.host) == 2, f"waited for rank 1, says {int(space.host) - 1}"
        print("rank 0 gave up on rank 1", flush=True)


def main():
    kind = {"fp32": torch.float32, "fp16": torch.float16}[sys.argv[1]]
    numbers = [int(text) for text in sys.argv[2:8]]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD):
            Path(folder, str(rank)).write_bytes(bytes(BYTES + WORLD * SLOTS * 4))
        mp.spawn(on_rank, (folder, kind, numbers), WORLD)


if __name__ == "__main__":
    main()
