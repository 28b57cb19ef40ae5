"""Dense kernels against cuBLAS + NCCL, torch's fused operators and separate kernels: medians, ms.

Variants of one shape run in turn, round by round; of each round the slowest rank counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from dynaflow_train.overlap_kernels import all_reduce_rms_norm as arn
from dynaflow_train.overlap_kernels.all_gather_matmul import all_gather_matmul
from dynaflow_train.overlap_kernels.matmul_all_reduce import matmul_all_reduce
from dynaflow_train.overlap_kernels.matmul_reduce_scatter import matmul_reduce_scatter

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.pool import Pool

Function = Callable[[], Any]
TOKENS, ROUNDS, WARMUPS, PER_ROUND = 8192, 9, 2, 4
LLAMA = {"8B": (4096, 14_336, 6144), "70B": (8192, 28_672, 10_240)}  # hidden, FFN, qkv
NEEDS_S = 12.0  # of a shape, at most


def times(
    rank: int, pool: Pool, group: str, left: Callable[[], float], tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """One row a variant, all shapes; shapes that no time is left for are not there."""
    rows: list[dict[str, Any]] = []
    for name, shape, variants in shapes(pool, group, tokens):
        if left() < NEEDS_S:
            break
        found = medians(variants, pool.device, pool.ask)
        plain = found["plain"]
        for variant, ms in found.items():
            row = {"kernel": name, "shape": shape, "variant": variant, "ms": round(ms, 4)}
            rows.append(row | {"of plain": round(plain / ms, 3)})
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
        del variants
    return rows


def medians(
    variants: dict[str, Function], device: torch.device, ask: Callable[[str, str], list[str]]
) -> dict[str, float]:
    """Milliseconds a call; a variant that fails is left out on all ranks."""
    kept = dict(variants)
    for name, function in variants.items():
        try:
            for _ in range(WARMUPS):
                function()
            why = ""
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        whys = [each for each in ask("", why) if each]
        if whys:
            print(f"left out: {name}: {whys[0]}", flush=True)
            del kept[name]
    taken: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(ROUNDS):
        for name, function in kept.items():
            taken[name].append(timed(function, device))
    own = {name: statistics.median(each) for name, each in taken.items()}
    every = [json.loads(text) for text in ask("", json.dumps(own))]
    return {name: max(each[name] for each in every) for name in kept}


def timed(function: Function, device: torch.device) -> float:
    """Milliseconds of one of `PER_ROUND` calls in a row."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(PER_ROUND):
            function()
        return (time.perf_counter() - start) * 1e3 / PER_ROUND
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # launches run ahead
    begin.record()
    for _ in range(PER_ROUND):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / PER_ROUND


def shapes(pool: Pool, group: str, tokens: int) -> Iterator[tuple[str, str, dict[str, Function]]]:
    """Kernel, shape, variants; tensor parallel over the ranks there are."""
    world = dist.get_world_size()
    scale = tokens / TOKENS
    for model, sizes in LLAMA.items():
        hidden, ffn, qkv = (max(16, int(size * scale) // 16 * 16) for size in sizes)
        yield "all_reduce_rms_norm", f"{model} {tokens}x{hidden}", norm(pool, group, tokens, hidden)
        for name, inner in (("o", hidden), ("down", ffn)):
            k = inner // world
            shape = f"{model} {name} {tokens}x{k}x{hidden}"
            yield "matmul_reduce_scatter", shape, scatter(pool, group, (tokens, k, hidden))
            yield "matmul_all_reduce", shape, reduce(pool, group, (tokens, k, hidden))
        for name, outer in (("qkv", qkv), ("gate_up", 2 * ffn)):
            n = outer // world
            shape = f"{model} {name} {tokens}x{hidden}x{n}"
            yield "all_gather_matmul", shape, gather(pool, group, (tokens, hidden, n))


def made(pool: Pool, *shape: int) -> Tensor:
    """Random data: a GPU is slower with it than with zeros."""
    dtype = torch.bfloat16 if pool.device.type == "cuda" else torch.float32
    return torch.randn(shape, device=pool.device, dtype=dtype) * shape[-1] ** -0.5


def norm(pool: Pool, group: str, rows: int, width: int) -> dict[str, Function]:
    """All-reduce + add + RMSNorm, alone and with the product before it."""
    operand, residual, weight = made(pool, rows, width), made(pool, rows, width), made(pool, width)
    space = pool.take("all_reduce_rms_norm", group, "compute", operand.nbytes)
    rule, parameters = arn.Norm(), (weight, None)

    def after(reduced: Tensor) -> Any:
        return arn.reference(reduced, residual, weight, None, rule)

    on_gpu = pool.device.type == "cuda"
    compiled: Any = torch.compile(after, dynamic=False) if on_gpu else after
    lent = space.view(space.rank, (rows, width), operand.dtype)

    def plain() -> None:
        dist.all_reduce(operand)
        compiled(operand)

    def two_shot() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", group)
        compiled(symmetric)

    variants: dict[str, Function] = {"plain": plain, "the norm alone": lambda: compiled(operand)}
    if on_gpu:
        symmetric = symmetric_memory.empty((rows, width), dtype=operand.dtype, device=pool.device)
        symmetric_memory.rendezvous(symmetric, group)  # type: ignore[arg-type]
        variants["torch two-shot + norm"] = two_shot

    def fused(tuning: arn.Tuning, given: Tensor) -> Function:
        return lambda: arn.all_reduce_norm(space, given, residual, parameters, rule, tuning)

    for shots, ctas in ((1, 32), (1, 64), (1, 112), (2, 32), (2, 64), (2, 112)):
        variants[f"{shots} shot(s), {ctas} CTAs"] = fused(arn.Tuning(shots, ctas), lent)
    for chunks in (1, 2, 4):
        variants[f"copies, {chunks} chunks"] = fused(arn.Tuning(0, 112, chunks), lent)
    variants["1 shot, 112 CTAs, operand copied"] = fused(arn.Tuning(1, 112), operand)
    return variants


def scatter(pool: Pool, group: str, sizes: tuple[int, int, int]) -> dict[str, Function]:
    """Product + reduce-scatter."""
    rows, inner, width = sizes
    left, right = made(pool, rows, inner), made(pool, width, inner).t()
    out = left.new_empty(rows // dist.get_world_size(), width)
    space = pool.take("matmul_reduce_scatter", group, "compute", rows * width * left.itemsize)

    def plain() -> None:
        dist.reduce_scatter_tensor(out, left @ right)  # pyright: ignore[reportDeprecated]  # 2.11

    variants: dict[str, Function] = {"plain": plain, "the product alone": lambda: left @ right}
    if pool.device.type == "cuda":
        operator = torch.ops.symm_mem.fused_matmul_reduce_scatter
        variants["torch fused"] = lambda: operator(left, right, "sum", 0, group)
    for chunks in (1, 2, 4):
        variants[f"{chunks} chunks"] = lambda c=chunks: matmul_reduce_scatter(space, left, right, c)
    return variants


def reduce(pool: Pool, group: str, sizes: tuple[int, int, int]) -> dict[str, Function]:
    """Product + all-reduce."""
    rows, inner, width = sizes
    left, right = made(pool, rows, inner), made(pool, width, inner).t()
    space = pool.take("matmul_all_reduce", group, "compute", rows * width * left.itemsize)
    variants: dict[str, Function] = {"plain": lambda: dist.all_reduce(left @ right)}
    for chunks in (1, 2, 4, 8):
        variants[f"{chunks} chunks"] = lambda c=chunks: matmul_all_reduce(space, left, right, c)
    return variants


def gather(pool: Pool, group: str, sizes: tuple[int, int, int]) -> dict[str, Function]:
    """All-gather + product."""
    tokens, inner, width = sizes
    world = dist.get_world_size()
    own, right = made(pool, tokens // world, inner), made(pool, width, inner).t()
    whole = own.new_empty(tokens, inner)
    space = pool.take("all_gather_matmul", group, "compute", own.nbytes)

    def plain() -> Tensor:
        dist.all_gather_into_tensor(whole, own)  # pyright: ignore[reportDeprecated]  # 2.11
        return whole @ right

    variants: dict[str, Function] = {"plain": plain, "the product alone": lambda: whole @ right}
    if pool.device.type == "cuda":
        operator = torch.ops.symm_mem.fused_all_gather_matmul
        variants["torch fused"] = lambda: operator(own, [right], 0, group)
    for chunks in (1, 2, 4):
        variants[f"{chunks} chunks"] = lambda c=chunks: all_gather_matmul(space, own, right, c)
    return variants
