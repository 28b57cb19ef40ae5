"""Grouped matmul of rows sorted by expert, forward and backward, on as many SMs as it is given.

Persistent Triton kernels (grouped_tiles.py), or `torch._grouped_mm` where that measured faster; the
counts of rows stay on the device.
"""

from __future__ import annotations

import functools
import statistics
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import grouped_tiles as tiles

if TYPE_CHECKING:
    from collections.abc import Callable

Pass = Literal["forward", "dgrad", "wgrad"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRIALS = 5  # timed runs of a candidate at a shape's first use


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its output: tile, warps, buffers in flight, pieces of the epilogue."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    halves: int = 1
    flatten: bool = False
    store_tma: bool = False

    def options(self) -> dict[str, Any]:
        """What both kernels take by these names."""
        blocks = {name: getattr(self, name) for name in ("block_m", "block_n", "block_k")}
        rest: dict[str, Any] = {"group": self.group, "flatten": self.flatten}
        return blocks | rest | {"num_warps": self.warps, "num_stages": self.stages}


Choice = Tiling | Literal["torch"]
HOPPER: dict[Pass, tuple[Tiling, ...]] = {
    "forward": (
        Tiling(128, 256, 64, 8, 3),
        Tiling(128, 256, 64, 8, 4, halves=2, flatten=True),
        Tiling(128, 256, 64, 8, 4, halves=2, store_tma=True),
        Tiling(256, 128, 64, 8, 3, flatten=True),
        Tiling(128, 128, 64, 8, 4, flatten=True),
    ),
    "wgrad": (
        Tiling(128, 256, 64, 8, 3, store_tma=True),
        Tiling(256, 128, 64, 8, 3, store_tma=True),
        Tiling(128, 128, 64, 8, 4, store_tma=True),
    ),
}
HOPPER["dgrad"] = HOPPER["forward"]
ODD = Tiling(128, 128, 64, 8, 3)  # for rows that no descriptor can hold
FULL = Tiling(64, 64, 32, 4, 2)  # fp32 multiplies without tensor cores, exactly
SMALL = Tiling(16, 32, 16, 4, 2)  # the interpreter's time goes by the number of its operations


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    knobs: Any = triton.knobs  # pyright: ignore[reportAttributeAccessIssue]
    return bool(knobs.runtime.interpret)


def reference(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The plain-torch meaning: one matmul an expert. Waits for the counts; differentiable."""
    pieces = torch.tensor_split(x, ends.cpu()[:-1].long())
    return torch.cat([rows @ one for rows, one in zip(pieces, weight, strict=True)])


def can_run(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> str | None:
    """None, or why the Triton kernels cannot take these operands (see grouped_matmul)."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
        found = f"{list(x.shape)} and {list(weight.shape)}"
        return f"it multiplies [rows, K] by [experts, K, N], found {found}"
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        return f"it takes bf16, fp16 or fp32, both alike, found {x.dtype} and {weight.dtype}"
    if ends.dtype != torch.int32 or list(ends.shape) != [weight.shape[0]] or ends.stride(0) != 1:
        found = f"{ends.dtype} {list(ends.shape)}"
        return f"ends must be {weight.shape[0]} int32 numbers in one piece, found {found}"
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        return f"each expert's weight must be dense, found strides {weight.stride()}"
    if {x.device, weight.device, ends.device} != {x.device}:
        return f"operands are on {x.device}, {weight.device} and {ends.device}"
    if x.device.type == "cpu":
        return None if interpreted() else "on the CPU it needs Triton's interpreter"
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        found = torch.cuda.get_device_capability(x.device)
        return f"it needs compute capability 9.0 (TMA), found {found[0]}.{found[1]}"
    return None


def all_sms(device: torch.device) -> int:
    """SMs of a device; 3 in the interpreter, where programs run one after the other."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def by_tma(tensor: torch.Tensor) -> bool:
    """Whether a descriptor can hold it: rows at multiples of 16 bytes."""
    strides = [stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]]
    return tensor.data_ptr() % 16 == 0 and not any(strides) and tensor.stride(-1) == 1


def describe(tensor: torch.Tensor, *block: int) -> Any:
    """Its TMA descriptor; the tensor itself where it can have none."""
    if not by_tma(tensor):
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def hold_context(device: torch.device) -> None:
    """Make the device's context this thread's, which encoding a descriptor needs.

    Autograd's threads may have none: memory from the cache and a device that is current already
    call nothing that would make it so. Recording an event does, in a capture too.
    """
    if device.type == "cuda" and threading.current_thread() is not threading.main_thread():
        torch.cuda.current_stream(device).record_event()


def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    tiling: Tiling,
    sms: int,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y[r] = x[index[r]] @ weight[expert of r]`, by Triton; no autograd.

    Args:
        x: [rows, K], or [tokens, K] with `index`; dense.
        weight: [experts, K, N], dense, either of K and N contiguous.
        ends: int32 [experts], the row after each expert's last; rows after the last stay unwritten.
        tiling: the cut.
        sms: programs in the grid.
        index: int32 [rows], the row of `x` that a row takes; None: its own.
    """
    hold_context(x.device)
    x = x.contiguous()
    experts, k, n = weight.shape
    rows = x.shape[0] if index is None else index.shape[0]
    y = x.new_empty(rows, n)
    if not rows:
        return y
    k_major = not weight.is_contiguous()
    dense = weight.mT if k_major else weight
    shape = (tiling.block_n, tiling.block_k) if k_major else (tiling.block_k, tiling.block_n)
    half = (tiling.block_m, tiling.block_n // tiling.halves)
    w_tma, y_tma = describe(dense, 1, *shape), describe(y, *half)
    x_tma = x if index is not None else describe(x, tiling.block_m, tiling.block_k)
    kernel: Any = tiles.rows_kernel
    kernel[(sms,)](
        x_tma,
        w_tma,
        y,
        y_tma,
        index,
        ends,
        k,
        n,
        experts,
        padded=max(128, triton.next_power_of_2(experts)),  # few sizes: few kernels to compile
        x_tma=x_tma is not x,
        w_tma=w_tma is not dense,
        y_tma_on=tiling.store_tma and y_tma is not y,
        gather=index is not None,
        k_major=k_major,
        halves=tiling.halves,
        **tiling.options(),
    )
    return y


def multiply_columns(
    p: torch.Tensor,
    q: torch.Tensor,
    ends: torch.Tensor,
    tiling: Tiling,
    sms: int,
) -> torch.Tensor:
    """`out[e] = p_e^T q_e` over the rows of each expert, zeros without rows: [experts, M, N].

    Args:
        p: [rows, M], dense.
        q: [rows, N], dense.
        ends: int32 [experts], the row after each expert's last.
        tiling: the cut; its `block_k` counts rows.
        sms: programs in the grid.
    """
    hold_context(p.device)
    p, q = p.contiguous(), q.contiguous()
    (m,), (n,), experts = p.shape[1:], q.shape[1:], ends.shape[0]
    out = p.new_empty(experts, m, n)
    tma = by_tma(p) and by_tma(q) and p.shape[0] > 0
    out_tma = describe(out, 1, tiling.block_m, tiling.block_n)
    kernel: Any = tiles.weights_kernel
    kernel[(sms,)](
        describe(p, tiling.block_k, tiling.block_m) if tma else p,
        describe(q, tiling.block_k, tiling.block_n) if tma else q,
        out,
        out_tma,
        ends,
        m,
        n,
        experts,
        padded=max(128, triton.next_power_of_2(experts)),
        tma=tma,
        out_tma_on=tiling.store_tma and out_tma is not out,
        **tiling.options(),
    )
    return out


def by_torch(name: Pass, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, sms: int) -> Any:
    """One pass by `torch._grouped_mm`, on so many SMs."""
    spared = all_sms(a.device) - sms
    if spared:
        torch._C._set_sm_carveout_experimental(spared)
    try:
        return torch._grouped_mm(a.mT if name == "wgrad" else a, b, ends)
    finally:
        if spared:
            torch._C._set_sm_carveout_experimental(None)


def run(
    name: Pass, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, choice: Choice, sms: int
) -> torch.Tensor:
    """One pass of one choice: rows times weights, or columns times columns."""
    if choice == "torch":
        return by_torch(name, a, b, ends, sms)
    multiply = multiply_columns if name == "wgrad" else multiply_rows
    return multiply(a, b, ends, choice, sms)


def candidates(name: Pass, dtype: torch.dtype, *widths: int) -> list[Choice]:
    """What may run a pass; torch's own takes bf16 in rows of multiples of 16 bytes."""
    if interpreted():
        return [SMALL]
    if dtype == torch.float32:
        return [FULL]
    if any(width % 8 for width in widths):
        return [ODD]
    return [*HOPPER[name], *(["torch"] if dtype == torch.bfloat16 else [])]


def timed(step: Callable[[], object]) -> float:
    """Median of TRIALS runs, ms on the device."""
    times: list[float] = []
    for trial in range(TRIALS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times += [start.elapsed_time(stop)] if trial > 1 else []
    return statistics.median(times)


def measured(
    name: Pass,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    k_major: bool,
    sms: int,
    device: torch.device,
) -> dict[Choice, float]:
    """Times in ms of every candidate, on random rows spread evenly over the experts.

    Args:
        name: the pass.
        shape: rows, experts, and the widths of the two operands (K and N; wgrad: M and N).
        dtype: of the operands.
        k_major: whether K is the weight's contiguous dimension.
        sms: SMs to use.
        device: where.
    """
    rows, experts, k, n = shape
    ends = (torch.arange(1, experts + 1, device=device) * rows // experts).int()
    a = torch.randn(rows, k, device=device, dtype=dtype)
    if name == "wgrad":
        b = torch.randn(rows, n, device=device, dtype=dtype)
    else:
        sizes = (experts, n, k) if k_major else (experts, k, n)
        b = torch.randn(sizes, device=device, dtype=dtype)
        b = b.mT if k_major else b
    every = candidates(name, dtype, k, n)
    return {one: timed(functools.partial(run, name, a, b, ends, one, sms)) for one in every}


@functools.cache
def choices() -> dict[Any, dict[Choice, float]]:
    """What was measured in this process, by the arguments of `measured`."""
    return {}


def choose(name: Pass, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, sms: int) -> Choice:
    """The fastest way to run a pass, measured at the first use of its shape.

    Raises:
        KernelError: a first use inside a CUDA graph's capture, where nothing can be measured.
    """
    every = candidates(name, a.dtype, a.shape[-1], b.shape[-1])
    if len(every) == 1:
        return every[0]
    shape = a.shape[0], ends.shape[0], a.shape[1], b.shape[-1]
    k_major = name != "wgrad" and not b.is_contiguous()
    key = (name, shape, a.dtype, k_major, sms, a.device)
    if key not in choices():
        if torch.cuda.is_current_stream_capturing():
            what = f"{name} of {shape[0]} rows, {shape[1]} experts, {shape[2]} by {shape[3]}"
            raise KernelError(f"{what} was never run before this capture; run the step once first.")
        choices()[key] = measured(*key)
    return min(choices()[key], key=choices()[key].__getitem__)


def one_pass(
    name: Pass, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, sms: int, given: Choice | None
) -> torch.Tensor:
    """One pass by the given or the fastest choice."""
    return run(name, a, b, ends, given or choose(name, a, b, ends, sms), sms)


class GroupedMatmul(torch.autograd.Function):
    """Forward, dgrad and wgrad, each by its own choice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        sms: int,
        given: dict[Pass, Choice],
    ) -> torch.Tensor:
        """Rows times their expert's weight."""
        ctx.save_for_backward(x, weight, ends)
        ctx.sms, ctx.given = sms, given
        return one_pass("forward", x, weight, ends, sms, given.get("forward"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> Any:
        """Gradients: dY W^T by rows; the weight's gradient in the weight's own layout."""
        x, weight, ends = ctx.saved_tensors
        dy, dx, dw = gradients[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = one_pass("dgrad", dy, weight.mT, ends, ctx.sms, ctx.given.get("dgrad"))
        if ctx.needs_input_grad[1]:
            pair = (x, dy) if weight.is_contiguous() else (dy, x)
            dw = one_pass("wgrad", *pair, ends, ctx.sms, ctx.given.get("wgrad"))
            dw = dw if weight.is_contiguous() else dw.mT
        return dx, dw, None, None, None


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    sms: int | None = None,
    given: dict[Pass, Choice] | None = None,
) -> torch.Tensor:
    """`x[r] @ weight[expert of r]` with gradients, without a host sync.

    Args:
        x: [rows, K], bf16, fp16 or fp32, sorted by expert.
        weight: [experts, K, N], dense, K or N contiguous (`parameter.mT` of [experts, N, K] does).
        ends: int32 [experts], the row after each expert's last. Rows past the last expert's are
            not written, here as in `torch._grouped_mm`, nor are their gradients.
        sms: SMs it may hold; None: all.
        given: choices by pass, instead of the fastest by measurement.

    Returns:
        [rows, N], accumulated in fp32.

    Raises:
        KernelError: operands that no kernel takes, or a first use of a shape within a capture.
    """
    if (why_not := can_run(x, weight, ends)) is not None:
        raise KernelError(f"grouped_matmul cannot run here: {why_not}.")
    return GroupedMatmul.apply(x.contiguous(), weight, ends, sms or all_sms(x.device), given or {})
