"""Whether the dense kernels are right: random shapes, forward and backward, against fp32.

All ranks draw all ranks' operands from the same seeds, so that the reference needs no collective.
An error is the worse of the norm's and the largest element's; what is allowed follows from the
error of the plain chain in the same dtype.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import all_gather_matmul as agm
from dynaflow_train.overlap_kernels import all_reduce_rms_norm as arn
from dynaflow_train.overlap_kernels import matmul_all_reduce as mar
from dynaflow_train.overlap_kernels import matmul_reduce_scatter as mrs

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.pool import Pool, Space

FACTOR = 3.0
SLEEP_CYCLES = 20_000_000  # about 10 ms


@dataclass(frozen=True)
class Case:
    """One shape of one kernel: sizes, and what makes it a different kernel."""

    kernel: str
    rows: int
    inner: int
    width: int
    dtype: torch.dtype
    norm: arn.Norm = field(default_factory=arn.Norm)
    tuning: arn.Tuning = field(default_factory=arn.Tuning)
    residual: bool = True
    chunks: int = 2

    def __str__(self) -> str:
        text = f"{self.kernel} {self.rows}x{self.inner}x{self.width} {self.dtype}"
        if self.kernel != "all_reduce_rms_norm":
            return f"{text} chunks={self.chunks}"
        tuning = f"shots={self.tuning.shots} ctas={self.tuning.ctas}"
        return f"{text} {self.norm.kind} {tuning} residual={self.residual}"


# What is compiled anew for each: widths (odd ones too), norms, shots and dtypes.
NORMS: tuple[tuple[int, str, int, torch.dtype, bool], ...] = (
    (4096, "rms", 1, torch.bfloat16, True),
    (8192, "rms", 2, torch.bfloat16, True),
    (5120, "layer", 0, torch.bfloat16, True),
    (777, "layer", 2, torch.float32, False),
    (1000, "layer", 1, torch.float16, True),
    (33, "rms", 0, torch.float32, False),
)
SMALL: tuple[tuple[int, str, int, torch.dtype, bool], ...] = tuple(
    (width, norm, shots, dtype, residual)
    for (width, (norm, shots), (dtype, residual)) in zip(
        (16, 40, 13, 32, 1, 37),
        (("rms", 1), ("rms", 2), ("rms", 0), ("layer", 1), ("layer", 2), ("layer", 0)),
        ((torch.float32, True), (torch.float16, True)) * 3,
        strict=True,
    )
)


def draw(
    kernel: str, seed: int, *, small: bool, ctas: tuple[int, ...] = (8, 64, 112), kinds: int = 6
) -> Case:
    """A random case; `small` for the interpreter, `kinds` of norms, `ctas` to choose from."""
    pick = random.Random(f"{kernel} {seed}")
    most = 24 if small else 1500
    rows = pick.choice((pick.randint(1, most), pick.randint(1, 9), 1))
    if kernel == "all_reduce_rms_norm":
        known = (SMALL if small else NORMS)[:kinds]
        width, norm, shots, dtype, residual = known[seed % len(known)]
        tuning = arn.Tuning(shots, pick.choice((3, 7) if small else ctas), 3)
        kind = arn.Norm(norm, 1e-5)  # type: ignore[arg-type]
        return Case(kernel, rows, 0, width, dtype, kind, tuning, residual)
    dtypes = (torch.float32, torch.float16) if small else (torch.bfloat16, torch.float16)
    inner, width = (pick.choice((pick.randint(1, most), 8 * pick.randint(1, 9))) for _ in "ab")
    chunks = pick.choice((1, 2, 3, 4))
    return Case(kernel, rows, inner, width, pick.choice(dtypes), chunks=chunks)


def random_tensor(seed: object, shape: tuple[int, ...], like: Case, device: torch.device) -> Tensor:
    """The same on all ranks, which have the same kind of device."""
    generator = torch.Generator(device).manual_seed(hash_of(seed))
    return torch.randn(shape, generator=generator, device=device).to(like.dtype)


def hash_of(seed: object) -> int:
    """Equal in all processes, unlike `hash`."""
    return random.Random(str(seed)).getrandbits(40)


def inputs_of(case: Case, rank: int, world: int, seed: int, device: torch.device) -> list[Tensor]:
    """What a rank gives the kernel; then the gradients of its outputs."""

    def made(name: str, shape: tuple[int, ...], *, shared: bool = False) -> Tensor:
        return random_tensor((seed, name, "all" if shared else rank), shape, case, device)

    r, k, n = case.rows, case.inner, case.width
    scale = max(k, 1) ** -0.5
    if case.kernel == "all_reduce_rms_norm":
        weight = made("weight", (n,), shared=True) * 0.1 + 1
        given = [made("operand", (r, n)), made("residual", (r, n), shared=True), weight]
        given.append(made("bias", (n,), shared=True))
        return [*given, made("of 0", (r, n), shared=True), made("of 1", (r, n), shared=True)]
    if case.kernel == "all_gather_matmul":
        return [made("a", (r, k)), made("b", (k, n)) * scale, made("of", (world * r, n))]
    rows = world * r if case.kernel == "matmul_reduce_scatter" else r
    shared = case.kernel == "matmul_all_reduce"
    return [made("a", (rows, k)), made("b", (k, n)) * scale, made("of", (r, n), shared=shared)]


def nbytes(case: Case, world: int) -> int:
    """Shared memory for forward and backward."""
    widest = max(case.inner, case.width)
    return max(512, world * case.rows * widest * case.dtype.itemsize)


def run(case: Case, space: Space, given: list[Tensor]) -> list[Tensor]:
    """The kernel's outputs and gradients."""
    if case.kernel == "all_reduce_rms_norm":
        leaves = [each.detach().requires_grad_() for each in given[:4]]
        operand, residual, weight, bias = leaves
        layer = case.norm.kind == "layer"
        rest = residual if case.residual else None
        parameters = (weight, bias if layer else None)
        outs = arn.fused(operand, rest, parameters, space, case.norm, case.tuning)
        wanted = [operand, weight, *([residual] if case.residual else []), *([bias] * layer)]
        return [*outs, *torch.autograd.grad(outs, wanted, given[4:])]
    a, b = (each.detach().requires_grad_() for each in given[:2])
    module: Any = {"all_gather_matmul": agm, "matmul_reduce_scatter": mrs}.get(case.kernel, mar)
    out = module.fused(a, b, space, case.chunks)
    return [out, *torch.autograd.grad(out, (a, b), given[2])]


def plain(case: Case, rank: int, everyone: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """The same by the plain chain in a dtype, from all ranks' inputs."""
    every = [[each.to(dtype) for each in given] for given in everyone]
    own, world = every[rank], len(every)
    if case.kernel == "all_reduce_rms_norm":
        return _plain_norm(case, rank, every)
    a, b, of = (list(each) for each in zip(*every, strict=True))
    if case.kernel == "all_gather_matmul":
        whole = torch.cat(a)
        of_rows = sum_of([of[r] @ b[r].t() for r in range(world)]).chunk(world)[rank]
        return [agm.reference(whole, own[1]), of_rows, whole.t() @ own[2]]
    if case.kernel == "matmul_reduce_scatter":
        whole = torch.cat(of)
        out = sum_of([a[r] @ b[r] for r in range(world)]).chunk(world)[rank]
        return [out, whole @ own[1].t(), own[0].t() @ whole]
    out = sum_of([a[r] @ b[r] for r in range(world)])
    return [out, own[2] @ own[1].t(), own[0].t() @ own[2]]


def sum_of(parts: list[Tensor]) -> Tensor:
    """In the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _plain_norm(case: Case, rank: int, every: list[list[Tensor]]) -> list[Tensor]:
    layer = case.norm.kind == "layer"
    reduced = sum_of([given[0] for given in every]).detach().requires_grad_()
    residual, weight, bias = (each.detach().requires_grad_() for each in every[rank][1:4])
    rest = residual if case.residual else None
    outs = arn.reference(reduced, rest, weight, bias if layer else None, case.norm)
    wanted = [reduced, weight, *([residual] if case.residual else []), *([bias] * layer)]
    return [*outs, *torch.autograd.grad(outs, wanted, every[rank][4:])]


def error(found: Tensor, exact: Tensor) -> float:
    """The worse of norm and largest element, relative; infinite where it is not finite."""
    wide = found.to(exact.dtype)
    if not bool(torch.isfinite(wide).all()):
        return float("inf")
    tiny = torch.finfo(torch.float32).tiny
    off = wide - exact
    by_norm = off.norm() / exact.norm().clamp_min(tiny)
    by_element = off.abs().max() / exact.abs().max().clamp_min(tiny)
    return float(torch.maximum(by_norm, by_element).detach())


def wrong(case: Case, rank: int, space: Space, seed: int, late: float) -> str:
    """What is wrong with one case, or ""; `late` is the chance of this rank's being late."""
    device = space.state.device
    everyone = [inputs_of(case, r, space.world, seed, device) for r in range(space.world)]
    if random.Random(f"{seed} {rank}").random() < late:
        delay(device)
    found = run(case, space, everyone[rank])
    exact_dtype = torch.float64 if case.dtype == torch.float32 else torch.float32
    exact = plain(case, rank, everyone, exact_dtype)
    same = plain(case, rank, everyone, case.dtype)
    checked(case, rank, space)
    for index, (a, b, c) in enumerate(zip(found, exact, same, strict=True)):
        allowed = FACTOR * error(c, b) + 2 * torch.finfo(case.dtype).eps
        if (off := error(a, b)) > allowed:
            return f"{case}: output {index} is off by {off:.2e}, {allowed:.2e} allowed"
    return ""


def checked(case: Case, rank: int, space: Space) -> None:
    """Fail with the case in which a rank did not come."""
    if space.state.is_cuda:
        torch.cuda.synchronize()
    try:
        space.check()
    except KernelError as error:
        raise KernelError(f"rank {rank}, {case}: {error}") from error


def delay(device: torch.device) -> None:
    """This rank comes late."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    else:
        time.sleep(0.02)


def graph_wrong(case: Case, rank: int, space: Space, replays: int) -> str:
    """Captured once, forward and backward, and replayed on other inputs."""
    device = space.state.device
    given = inputs_of(case, rank, space.world, 0, device)
    run(case, space, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run(case, space, given)
    for seed in range(1, replays + 1):
        fresh = inputs_of(case, rank, space.world, seed, device)
        for into, source in zip(given, fresh, strict=True):
            into.copy_(source)
        if random.Random(f"graph {seed} {rank}").random() < 0.3:
            delay(device)
        graph.replay()
        checked(case, rank, space)
        recorded = [each.clone() for each in found]
        eager = run(case, space, fresh)
        for index, (a, b) in enumerate(zip(recorded, eager, strict=True)):
            if error(a, b.double()) > 8 * torch.finfo(case.dtype).eps:
                return f"{case}: replay {seed} differs from the eager call in output {index}"
    return ""


def repeat_wrong(case: Case, rank: int, space: Space, calls: int) -> str:
    """Whole numbers, summed exactly, many times without a pause; all results are compared."""
    device, world = space.state.device, space.world
    given = inputs_of(case, rank, world, 0, device)
    misses = torch.zeros((), device=device)
    for number in range(calls):
        if case.kernel == "all_reduce_rms_norm":
            operand = torch.full_like(given[0], float(number % 50 + rank))
            nothing = (None, None)
            made = arn.all_reduce_norm(
                space, operand, None, nothing, arn.Norm("none"), case.tuning
            ).total
            wanted = float(world * (number % 50) + sum(range(world)))
        else:
            a = torch.full_like(given[0], float(number % 5 + rank))
            b = torch.ones_like(given[1])
            module: Any = {"all_gather_matmul": agm, "matmul_reduce_scatter": mrs}
            made = module.get(case.kernel, mar).fused(a, b, space, case.chunks)
            wanted = case.inner * float(world * (number % 5) + sum(range(world)))
            if case.kernel == "all_gather_matmul":
                made = made.view(world, -1).float().sum(0)
        misses += (made != wanted).any()
        if random.Random(f"repeat {number} {rank}").random() < 0.002:
            delay(device)
    checked(case, rank, space)
    return f"{case}: {int(misses)} of {calls} calls were wrong" if int(misses) else ""


KERNELS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce_rms_norm")


def space_of(pool: Pool, group: str, case: Case, world: int) -> Space:
    """From the pool: one for each kernel, as large as needed so far."""
    return pool.take(case.kernel, group, "compute", nbytes(case, world))
