# pyright: basic, reportArgumentType=false, reportIndexIssue=false
"""Grouped matmul on one GPU: right on random shapes, in a graph, after 10,000 runs; then its times.

python -m dynaflow_train.benchmarks.grouped --out grouped.json
TRITON_INTERPRET=1 python -m dynaflow_train.benchmarks.grouped --device cpu     # a rehearsal
compute-sanitizer --tool memcheck python -m dynaflow_train.benchmarks.grouped --few

Exits with 1 where a result is wrong. Times are medians, candidates in turn, random data, against
`torch._grouped_mm`; rows are those of one of two ranks (EP 2) with 8192 tokens each.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from dynaflow_train.benchmarks.timing import order
from dynaflow_train.overlap_kernels import grouped_matmul as gm

TOKENS, RANKS = 8192, 2
MODELS = {  # hidden, width of an expert, experts of both ranks, top k
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "qwen2-57b-a14b": (3584, 2560, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
SLACK = {torch.float32: 4.0, torch.bfloat16: 1.5, torch.float16: 1.5}  # of torch's own error
SINGLE = torch.finfo(torch.float32).eps
PASSES: tuple[gm.Pass, ...] = ("forward", "dgrad", "wgrad")
TILES = {name: gm.HOPPER[name] for name in PASSES}


@dataclass(frozen=True)
class Case:
    """One random problem and the choices it is solved by."""

    counts: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype
    k_major: bool
    sms: int | None
    place: int

    def choices(self, device):
        """Tilings in turn; the one that takes all where rows cannot be held by a descriptor."""
        if device.type == "cpu":
            return dict.fromkeys(PASSES, gm.SMALL)
        if self.dtype == torch.float32:
            return dict.fromkeys(PASSES, gm.FULL)
        if self.k % 8 or self.n % 8:
            return dict.fromkeys(PASSES, gm.ODD)
        turn = self.place % 5 if self.dtype == torch.bfloat16 and self.k % 16 == 0 else 0
        return {name: TILES[name][turn % len(TILES[name])] for name in PASSES}


def random_cases(number, device):
    """Empty experts, single rows, odd widths, up to 128 experts, both layouts, three dtypes."""
    chance, cases = random.Random(0), []
    small, widest = device.type == "cpu", 72 if device.type == "cpu" else 700
    for place in range(number):
        experts = chance.choice((1, 2, 3, 5) if small else (1, 2, 3, 8, 17, 64, 128))
        most = chance.choice((1, 9, 40) if small else (1, 60, 300, 900))
        counts = [chance.choice((0, 1, most, chance.randint(0, most))) for _ in range(experts)]
        dtypes = (torch.float32, torch.float16) + (() if small else (torch.bfloat16,) * 4)
        step = chance.choice((1, 8, 16, 16))  # few kinds of alignment: few kernels to compile
        k, n = ((chance.randint(0, widest // step) | (step < 16) or 1) * step for _ in range(2))
        dtype, major = chance.choice(dtypes), chance.random() < 0.5
        sms = chance.choice((None, None, 1, 2, 7) if small else (None, None, 1, 7, 116))
        cases.append(Case(tuple(counts), k, n, dtype, major, sms, place))
    return cases


def tensors(case, device, seed=0):
    """x, weight, ends, dy."""
    chance = torch.Generator(device).manual_seed(seed)
    make = functools.partial(torch.randn, generator=chance, device=device)
    x, dy = make(sum(case.counts), case.k), make(sum(case.counts), case.n)
    weight = make(len(case.counts), case.n, case.k) / case.k**0.5
    weight = weight.to(case.dtype)
    weight = weight.mT if case.k_major else weight.mT.contiguous()
    ends = torch.tensor(case.counts, device=device).cumsum(0).int()
    return x.to(case.dtype), weight, ends, dy.to(case.dtype)


def three(multiply, x, weight, ends, dy):
    """The results of all three passes."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = multiply(x, weight, ends)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def differences(found, x, weight, ends, dy):
    """By pass: whether it is right, errors of ours and of torch in this dtype: norm, largest."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    truth = three(gm.reference, x.to(wide), weight.to(wide), ends, dy.to(wide))
    plain = three(gm.reference, x, weight, ends, dy)
    said = []
    # One fp32 sum in order of its n terms errs by about 0.16 eps sqrt(n), of any kernel; torch's
    # product of a single row adds in a tree, and errs less than its own product of many rows.
    sums = [x.shape[1], dy.shape[1], int(ends.diff(prepend=ends.new_zeros(1)).max())]
    in_order = [SINGLE * terms**0.5 / 3 for terms in sums]
    for name, least, ours, theirs, exact in zip(PASSES, in_order, found, plain, truth, strict=True):
        if not exact.numel():
            continue
        errors = [(one.to(wide) - exact).abs() for one in (ours, theirs)]
        norm, own = (float(error.norm() / exact.norm().clamp(min=1e-30)) for error in errors)
        most, most_own = (float(error.max()) for error in errors)
        floor, slack = max(torch.finfo(x.dtype).eps / 16, least), SLACK[x.dtype]
        fine = norm <= slack * own + floor
        least = max(torch.finfo(x.dtype).eps, 4 * least) * float(exact.abs().max())
        fine &= most <= 2 * slack * most_own + least
        said.append((name, fine, norm, own, most, most_own))
    return said


def check(name, found, *operands):
    """Whether the results are right; says what is not."""
    wrong = [one for one in differences(found, *operands) if not one[1]]
    for which, _, norm, own, most, most_own in wrong:
        print(f"WRONG {name} {which}: error {norm:.3g} ({own:.3g} torch), largest {most:.3g} "
              f"({most_own:.3g})", flush=True)  # fmt: skip
    return not wrong


def solve(case, device):
    """Ours, by the case's choices."""
    operands = tensors(case, device)
    given = case.choices(device)
    multiply = functools.partial(gm.grouped_matmul, sms=case.sms, given=given)
    return three(multiply, *operands), operands


def shape_kinds(case, device):
    """What decides which kernels a case compiles."""
    kinds = tuple((width % 16 == 0, width % 8 == 0, width == 1) for width in (case.k, case.n))
    return case.dtype, case.k_major, kinds, str(case.choices(device))


def random_shapes(cases, device):
    """Number of wrong cases."""
    kinds = {shape_kinds(case, device): case for case in cases}
    start = time.perf_counter()
    if device.type == "cuda":  # MLIR and ptxas let go of the interpreter's lock
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda case: solve(case, device)[0][0].numel(), kinds.values()))
        print(f"compiled {len(kinds)} kinds in {time.perf_counter() - start:.0f} s", flush=True)
    wrong = 0
    for place, case in enumerate(cases):
        found, operands = solve(case, device)
        wrong += not check(f"{case}", found, *operands)
        if place % 50 == 49:
            spent = time.perf_counter() - start
            print(f"{place + 1} shapes, {wrong} wrong, {spent:.0f} s", flush=True)
    return wrong


def in_graph(device):
    """Wrong replays of one graph, whose counts change between them: nothing is on the host."""
    case = Case((200, 0, 1, 311), 256, 512, torch.bfloat16, True, None, 1)
    x, weight, ends, dy = tensors(case, device)
    multiply = functools.partial(gm.grouped_matmul, given=case.choices(device))
    three(multiply, x, weight, ends, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = three(multiply, x, weight, ends, dy)
    wrong = 0
    for counts in ((200, 0, 1, 311), (0, 0, 0, 512), (1, 255, 256, 0), (128, 128, 128, 128)):
        ends.copy_(torch.tensor(counts, device=device).cumsum(0))
        graph.replay()
        torch.cuda.synchronize()
        wrong += not check(f"graph {counts}", found, x, weight, ends, dy)
    print(f"graph: {wrong} of 4 replays wrong", flush=True)
    return wrong


def repeated(device, times):
    """Wrong elements over many runs of one shape: each must repeat the first, bit by bit."""
    counts = (3, 0, 5) if device.type == "cpu" else (130, 0, 257, 1, 64)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    case = Case(counts, 64, 128, dtype, True, None, 1)
    operands = tensors(case, device)
    multiply = functools.partial(gm.grouped_matmul, given=case.choices(device))
    start, first = time.perf_counter(), three(multiply, *operands)
    found = first
    differ = torch.zeros((), device=device, dtype=torch.int64)
    for place in range(times):
        found = three(multiply, *operands)
        if place % 100 == 99 or place == times - 1:
            for a, b in zip(found, first, strict=True):
                differ += (a != b).sum()
    wrong = int(differ) + (not check("after repetitions", found, *operands))
    spent = time.perf_counter() - start
    print(f"{times} repetitions: {wrong} wrong, {spent:.1f} s", flush=True)
    return wrong


def split(rows, experts, skewed):
    """Rows by expert: even, or like 1 / rank with one expert left out."""
    shares = [1 / (1 + (5 * e) % experts) if skewed else 1.0 for e in range(experts)]
    shares[-1] *= not skewed
    counts = [int(rows * share / sum(shares)) for share in shares]
    counts[0] += rows - sum(counts)
    return counts


def problems(names, device):
    """(model, layer, rows, experts, K, N) of both expert products."""
    for name in names:
        hidden, width, experts, top = MODELS[name]
        rows, local = TOKENS * top, experts // RANKS
        if device.type == "cpu":
            rows, local, hidden, width = 40, 4, 32, 24
        yield name, "gate-up", rows, local, hidden, 2 * width
        yield name, "down", rows, local, width, hidden


def clocked(step, device):
    """Start and stop of a step, to be read later."""
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    stop.record()
    return start, stop


def medians(steps, device, rounds):
    """ms by name, in turn."""
    names, times = list(steps), {name: [] for name in steps}
    for place in range(rounds + 2):
        stamps = {names[i]: clocked(steps[names[i]], device) for i in order(len(names), place)}
        if device.type == "cuda":
            torch.cuda.synchronize()
        for name, stamp in stamps.items():
            took = stamp if isinstance(stamp, float) else stamp[0].elapsed_time(stamp[1])
            times[name] += [took] if place > 1 else []
    return {name: statistics.median(each) for name, each in times.items()}


def operands(which, x, weight, dy):
    """a and b of a pass."""
    return {"forward": (x, weight), "dgrad": (dy, weight.mT), "wgrad": (dy, x)}[which]


def label(choice):
    """A tiling in short."""
    if choice == "torch":
        return choice
    more = f"{'f' * choice.flatten}{'t' * choice.store_tma}{'h' * (choice.halves == 2)}"
    return (
        f"{choice.block_m}x{choice.block_n}x{choice.block_k}w{choice.warps}s{choice.stages}{more}"
    )


def one_problem(problem, skewed, device, options):
    """A row for each pass, number of SMs and candidate."""
    model, layer, rows, experts, k, n = problem
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    case = Case(tuple(split(rows, experts, skewed)), k, n, dtype, True, None, 0)
    x, weight, ends, dy = tensors(case, device)
    found = []
    for which in ("wgrad",) if options.skewed_wgrad else PASSES:
        a, b = operands(which, x, weight, dy)
        every = gm.candidates(which, dtype, k, n)
        for sms in (gm.all_sms(device), max(1, gm.all_sms(device) - 16)):
            run = functools.partial(gm.run, which, a, b, ends, sms=sms)
            steps = {label(one): functools.partial(run, choice=one) for one in every}
            times = medians(steps, device, options.rounds)
            base = times.get("torch")
            own = {name: ms for name, ms in times.items() if name != "torch"}
            best = min(own, key=own.__getitem__)
            for name, ms in times.items():
                found.append({
                    "model": model, "layer": layer, "rows": rows, "experts": experts, "k": k,
                    "n": n, "skewed": skewed, "pass": which, "sms": sms, "kernel": name,
                    "ms": round(ms, 4), "tflops": round(2e-9 * rows * k * n / ms, 1),
                    "over_torch": round(base / ms, 3) if base else None, "best": name == best,
                })  # fmt: skip
            times_torch = f"torch {base:.3f} ms, {base / own[best]:.3f}x" if base else "no torch"
            print(f"{model} {layer} {'skewed' if skewed else 'even'} {which} sms {sms}: "
                  f"{best} {own[best]:.3f} ms {2e-9 * rows * k * n / own[best]:.0f} TFLOP/s, "
                  f"{times_torch}", flush=True)  # fmt: skip
    return found


def write(out, rows, said):
    """JSON with everything, CSV with the times."""
    path = Path(out)
    path.write_text(json.dumps({**said, "times": rows}, indent=1))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["model"])
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Checks, then times; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--few", action="store_true", help="few shapes, no times: for memcheck")
    parser.add_argument("--shapes", type=int, help="random shapes (240; few or cpu: 12)")
    parser.add_argument("--repetitions", type=int, help="of one shape (10,000; few or cpu: 10)")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each candidate")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--skewed-wgrad", action="store_true", help="time nothing else")
    parser.add_argument("--seconds", type=float, default=150, help="no more times after these")
    parser.add_argument("--out", help="JSON, with a CSV beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    tiny = options.few or device.type == "cpu"
    if device.type == "cpu":
        options.rounds = 1
    start = time.perf_counter()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted"
    print(f"{where}, torch {torch.__version__}, triton {gm.triton.__version__}", flush=True)
    wrong = random_shapes(random_cases(options.shapes or (12 if tiny else 240), device), device)
    wrong += in_graph(device) if device.type == "cuda" else 0
    wrong += repeated(device, options.repetitions or (10 if tiny else 10_000))
    print(
        f"{'WRONG' if wrong else 'all right'} after {time.perf_counter() - start:.0f} s", flush=True
    )
    rows = []
    for problem in problems([] if options.few else options.models, device):
        for skewed in (True,) if options.skewed_wgrad else (False, True):
            if time.perf_counter() - start < options.seconds:
                rows += one_problem(problem, skewed, device, options)
    if options.out:
        write(options.out, rows, {"device": where, "torch": torch.__version__, "wrong": wrong})
    print(f"{time.perf_counter() - start:.0f} s; {'WRONG' if wrong else 'all right'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
