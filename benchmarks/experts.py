# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false
"""Experts fused with dispatch and combine, on one GPU: right, and how long.

python -m dynaflow_train.benchmarks.experts --out experts.json
TRITON_INTERPRET=1 python -m dynaflow_train.benchmarks.experts --device cpu

One rank with gradients, in a graph too; then two ranks' protocol with both on this one GPU, each on
half of the SMs and a stream of its own. Exits with 1 where a result is wrong. Times are medians
of forward + backward, in turn, of the layer on one rank: fused against gathered copies and
`torch._grouped_mm`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from dynaflow_train.benchmarks.grouped import MODELS, RANKS, TOKENS, medians
from dynaflow_train.overlap_kernels import experts as ex
from dynaflow_train.overlap_kernels import grouped_matmul as gm

SLOTS, LIMIT = 64, 3_000_000
SLACK = 1.7  # of plain torch's own error in the same dtype
FLOOR = {kind: torch.finfo(kind).eps / 16 for kind in (torch.bfloat16, torch.float16)}
FLOOR[torch.float32] = 3 * torch.finfo(torch.float32).eps  # of one sum in order of some 100 terms


def operands(world, tokens, top, local, k, width, n, device, dtype, seed=0):
    """x, w1, w2, weights, chosen; the last expert gets no token."""
    chance = torch.Generator(device).manual_seed(seed)
    make = functools.partial(torch.randn, generator=chance, device=device)
    experts = world * local
    scores = torch.rand(world, tokens, experts, generator=chance, device=device)
    if experts > top:
        scores[..., -1] = -1
    chosen = scores.topk(top).indices
    x = make(world, tokens, k).to(dtype)
    w1 = (make(experts, 2 * width, k) / k**0.5).to(dtype).mT
    w2 = (make(experts, n, width) / width**0.5).to(dtype).mT
    weights = torch.rand(world, tokens, top, generator=chance, device=device)
    return x, w1, w2, weights, chosen


def swiglu(hidden):
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def fused(x, w1, w2, weights, routing, split=None):
    hidden = swiglu(ex.dispatch_matmul(x, w1, routing, None, split))
    return ex.combine_matmul(hidden, w2, weights, routing, None, split)


def apart(multiply, x, w1, w2, weights, routing):
    """The same in separate steps: copies by index, two grouped products, a weighted sum."""
    hidden = swiglu(multiply(x.index_select(0, routing.source), w1, routing.ends))
    rows = multiply(hidden, w2, routing.ends)
    taken = rows.index_select(0, routing.positions.flatten()).unflatten(0, weights.shape[1:])
    if multiply is gm.reference:
        return (taken * weights[0][..., None]).sum(1).to(x.dtype)
    return torch.bmm(weights[0][:, None].to(x.dtype), taken)[:, 0]  # quick


def with_gradients(function, leaves, dout):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(name, found, own, truth):
    """Number of results that err more than SLACK times plain torch does."""
    wrong = 0
    for part, ours, theirs, exact in zip(
        ("out", "dx", "dw1", "dw2", "dweights"), found, own, truth, strict=False
    ):
        norm = exact.double().norm().clamp(min=1e-30)
        error, least = (
            float((one.double() - exact.double()).norm() / norm) for one in (ours, theirs)
        )
        fine = error <= SLACK * least + FLOOR[ours.dtype]
        wrong += not fine
        print(
            f"{'' if fine else 'WRONG '}{name} {part}: {error:.2e} (torch {least:.2e})", flush=True
        )
    return wrong


def one_rank(device, numbers, dtype):
    """Wrong results of one layer; then of the same in a graph, with another routing in it."""
    x, w1, w2, weights, chosen = operands(1, *numbers, device, dtype)
    routing = ex.route(chosen, numbers[2])
    dout = torch.randn(numbers[0], numbers[5], device=device).to(dtype)
    leaves = x[0], w1, w2, weights
    wide = [leaf.double() if dtype == torch.float32 else leaf.float() for leaf in leaves]

    def all_three(routing):
        plain = functools.partial(apart, gm.reference, routing=routing)
        return (
            with_gradients(functools.partial(fused, routing=routing), leaves, dout),
            with_gradients(plain, leaves, dout),
            with_gradients(plain, wide, dout.to(wide[0].dtype)),
        )

    wrong = compare(f"one rank {numbers} {dtype}", *all_three(routing))
    if device.type == "cpu":
        return wrong
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(functools.partial(fused, routing=routing), leaves, dout)
    other = ex.route(chosen.roll(1, 1), numbers[2])
    for field in dataclasses.fields(routing):
        getattr(routing, field.name).copy_(getattr(other, field.name))
    graph.replay()
    torch.cuda.synchronize()
    return wrong + compare("in a graph", found, *all_three(other)[1:])


@dataclass(frozen=True)
class Half:
    """One of two ranks on one GPU: `experts.Shared` over plain tensors, met by events."""

    rank: int
    buffers: tuple
    flags: tuple
    tables: torch.Tensor
    epochs: torch.Tensor
    state: torch.Tensor
    host: torch.Tensor
    limit: int
    barrier: threading.Barrier
    events: dict

    def meet(self):
        self.events[self.rank] = torch.cuda.Event()
        self.events[self.rank].record()
        self.barrier.wait(15)
        torch.cuda.current_stream().wait_event(self.events[1 - self.rank])
        self.barrier.wait(15)


def halves(device, nbytes, limit):
    buffers = tuple(torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    flags = tuple(torch.zeros(2, SLOTS, dtype=torch.int32, device=device) for _ in range(2))
    tables = [[each.data_ptr() for each in some] for some in (buffers, flags)]
    tables = torch.tensor(tables, device=device)
    barrier, events, zeros = (
        threading.Barrier(2),
        {},
        torch.zeros(2, SLOTS + 2, device=device).int(),
    )
    return [
        Half(
            rank, buffers, flags, tables, *zeros[rank].split([SLOTS, 1, 1]), limit, barrier, events
        )
        for rank in range(2)
    ]


def two_ranks(device, numbers, dtype, rounds):
    """Wrong results of both fused kernels, in both directions, of two ranks that run at once.

    Without rounds it only loads the kernels: that may have to wait for those that run, and so
    would wait for ever beside one that spins.
    """
    tokens, _, local, k, width, n = numbers
    x, w1, w2, weights, chosen = operands(2, *numbers, device, dtype)
    spaces = halves(device, 2 * tokens * max(k, n) * x.element_size(), LIMIT if rounds else 1)
    split = dataclasses.replace(ex.default_split(device, dtype), sms=gm.all_sms(device) // 2)
    streams = [torch.cuda.Stream() for _ in range(2)]
    hidden = torch.randn(2, chosen.numel(), width, device=device).to(dtype)
    results = {}

    def on_rank(rank):
        mine, routing = slice(rank * local, (rank + 1) * local), ex.route(chosen, local, rank)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[rank]):
            for place in range(max(rounds, 1)):
                torch.cuda._sleep(int(2e6) * (place % 3 == rank))  # one is late, in turn
                y, _ = ex.fetch_and_multiply(x[rank], w1[mine], routing, spaces[rank], split)
                out = ex.multiply_and_add(
                    hidden[rank], w2[mine], weights, routing, spaces[rank], split
                )
                back = ex.multiply_and_add(y, w1[mine].mT, None, routing, spaces[rank], split)
                results[rank] = routing, y, out, back
        streams[rank].synchronize()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on_rank, range(2)))
    if not rounds:
        return 0
    gave_up = sum(int(space.state) + int(space.host) for space in spaces)
    wrong = int(gave_up > 0)
    wrong += wrong_of_two(x, w1, w2, weights, hidden, results)
    print(f"two ranks on one GPU, {rounds} rounds: {wrong} wrong, gave up: {gave_up}", flush=True)
    return wrong


def wrong_of_two(x, w1, w2, weights, hidden, results):
    """What two ranks found, against sums of both ranks' plain products."""
    wrong, dtype, device = 0, x.dtype, x.device
    (tokens, k), local = x.shape[1:], w1.shape[0] // 2
    plain = [0.0, 0.0], [0.0, 0.0]
    exact = [0.0, 0.0], [0.0, 0.0]
    for rank in range(2):
        routing, y, _, _ = results[rank]
        mine, rows = slice(rank * local, (rank + 1) * local), int(routing.ends[-1])
        fetched = x.view(-1, k)[routing.source[:rows].long()]
        own = gm.reference(fetched, w1[mine], routing.ends)
        truth = gm.reference(fetched.float(), w1[mine].float(), routing.ends)
        wrong += compare(f"rank {rank} dispatch", [y[:rows]], [own], [truth])
        factor = weights.flatten()[routing.slot[:rows]][:, None]
        for which, rows_in, w, scale in (
            (0, hidden[rank][:rows], w2[mine], factor),
            (1, y[:rows], w1[mine].mT, 1.0),
        ):
            for sums, wide in ((plain, dtype), (exact, torch.float32)):
                made = gm.reference(rows_in.to(wide), w.to(wide), routing.ends).float() * scale
                for owner in range(2):
                    at = routing.source[:rows].long() // tokens == owner
                    total = torch.zeros(tokens, made.shape[1], device=device)
                    total.index_add_(0, routing.source[:rows].long()[at] % tokens, made[at])
                    sums[which][owner] = sums[which][owner] + total.to(wide)
    for which, name in enumerate(("combine", "dispatch's dgrad")):
        for rank in range(2):
            found = results[rank][2 + which]
            wrong += compare(
                f"rank {rank} {name}", [found], [plain[which][rank]], [exact[which][rank]]
            )
    return wrong


def layer_times(name, device, rounds):
    """Medians of forward + backward of one rank's layer."""
    hidden, width, experts, top = MODELS[name]
    numbers = TOKENS, top, experts // RANKS, hidden, width, hidden
    if device.type == "cpu":
        numbers = 10, 2, 3, 16, 8, 16
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    x, w1, w2, weights, chosen = operands(1, *numbers, device, dtype)
    routing, leaves = ex.route(chosen, numbers[2]), (x[0], w1, w2, weights)
    dout = torch.randn(numbers[0], numbers[5], device=device).to(dtype)
    steps, base = {}, ex.default_split(device, dtype)
    multiply = gm.reference if device.type == "cpu" else torch._grouped_mm
    apart_torch = functools.partial(apart, multiply, routing=routing)
    steps["apart"] = functools.partial(with_gradients, apart_torch, leaves, dout)
    for movers, wide in ((8, 4), (16, 4), (16, 2), (32, 4)) if device.type == "cuda" else ((2, 2),):
        split = dataclasses.replace(base, movers=movers, wide=wide)
        one = functools.partial(fused, routing=routing, split=split)
        steps[f"fused {movers} {wide}"] = functools.partial(with_gradients, one, leaves, dout)
    times = medians(steps, device, rounds)
    for which, ms in times.items():
        print(f"{name} {which}: {ms:.3f} ms, {times['apart'] / ms:.3f}x", flush=True)
    return {"model": name, **{which: round(ms, 4) for which, ms in times.items()}}


def checks(device, options, start):
    """Number of wrong results on one GPU."""
    cases = [
        ((500, 8, 16, 256, 128, 512), torch.bfloat16),
        ((77, 3, 5, 200, 72, 136), torch.bfloat16),
        ((300, 2, 4, 64, 32, 96), torch.float16),
        ((40, 1, 2, 64, 32, 64), torch.bfloat16),
        ((90, 4, 6, 75, 33, 61), torch.bfloat16),
    ]
    if not options.few:
        cases.append(((60, 2, 4, 48, 32, 80), torch.float32))
    warm = functools.partial(compile_case, device)
    with ThreadPoolExecutor(8) as pool:  # MLIR and ptxas let go of the interpreter's lock
        list(pool.map(warm, cases))
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    wrong = sum(one_rank(device, numbers, dtype) for numbers, dtype in cases)
    print(f"one rank: {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    numbers = (300, 4, 8, 256, 128, 512)
    two_ranks(device, numbers, torch.bfloat16, 0)
    wrong += two_ranks(device, numbers, torch.bfloat16, options.together)
    return wrong


def main() -> int:
    """Checks, then times while there are seconds left; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each variant")
    parser.add_argument("--together", type=int, default=60, help="rounds of two ranks at once")
    parser.add_argument("--seconds", type=float, default=150, help="no more times after these")
    parser.add_argument("--few", action="store_true", help="no times: for memcheck")
    parser.add_argument("--times-only", action="store_true", help="no checks")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--out", help="JSON")
    options = parser.parse_args()
    start, device = time.perf_counter(), torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cpu":
        wrong = one_rank(device, (9, 2, 3, 16, 8, 24), torch.float16)
        layer_times("mixtral-8x7b", device, 1)
        return int(wrong > 0)
    wrong = 0 if options.times_only else checks(device, options, start)
    print(f"after {time.perf_counter() - start:.0f} s", flush=True)
    found = [
        layer_times(name, device, options.rounds)
        for name in ([] if options.few else options.models)
        if time.perf_counter() - start < options.seconds
    ]
    if options.out:
        said = {"wrong": wrong, "times": found}
        Path(options.out).write_text(json.dumps(said, indent=1))
    print(f"{time.perf_counter() - start:.0f} s; {'WRONG' if wrong else 'all right'}", flush=True)
    return int(wrong > 0)


def compile_case(device, case):
    """Every kernel of a case, outside of autograd's one thread a device."""
    numbers, dtype = case
    x, w1, w2, weights, chosen = operands(1, *numbers, device, dtype)
    routing, split = ex.route(chosen, numbers[2]), ex.default_split(device, dtype)
    y, _ = ex.fetch_and_multiply(x[0], w1, routing, None, split)
    out = ex.multiply_and_add(swiglu(y), w2, weights, routing, None, split)
    ex.fetch_and_multiply(out, w2.mT, routing, None, split)
    ex.multiply_and_add(y, w1.mT, None, routing, None, split)
    ex.weight_gradient(x[0], y, w1, routing, split, routing.source)


if __name__ == "__main__":
    sys.exit(main())
