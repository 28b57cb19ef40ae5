"""Grouped matmul: right in Triton's interpreter, compiled for sm_90 as it is meant to be."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

import triton

from dynaflow_train.benchmarks import grouped
from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import grouped_matmul as gm
from dynaflow_train.overlap_kernels import grouped_tiles
from tests.kernels.compiling import compile_kernel

OLD = triton.__version__.startswith("3.6") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
interpreter = pytest.mark.skipif(OLD, reason="the interpreter of Triton 3.6 needs numpy < 2.4")


def interpret(*command, timeout=170):
    """Runs a module in Triton's interpreter: the mode is read when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@interpreter
def test_interpreted_against_torch():
    """Random shapes: no rows, one row, empty experts, odd widths; both layouts, fp32 and fp16."""
    module = "dynaflow_train.benchmarks.grouped"
    done = interpret(module, "--device", "cpu", "--few", "--shapes", "14", "--repetitions", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 repetitions: 0 wrong" in done.stdout
    assert done.stdout.endswith("all right\n")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_check_finds_one_wrong_element(place):
    case = grouped.Case((5, 0, 3), 24, 16, torch.float16, True, None, 0)
    operands = grouped.tensors(case, torch.device("cpu"))
    found = grouped.three(gm.reference, *operands)
    assert grouped.check("same", found, *operands)
    found[place].view(-1)[7] += 0.25
    assert not grouped.check("wrong", found, *operands)


def rows(tiling, k_major, kind="bf16", tma=True, gather=False):
    """The forward kernel as `multiply_rows` launches it."""
    weight = (tiling.block_n, tiling.block_k) if k_major else (tiling.block_k, tiling.block_n)
    x_tma, y_tma = tma and not gather, tma and tiling.store_tma
    given = {
        "x": f"tensordesc<{kind}[{tiling.block_m},{tiling.block_k}]>" if x_tma else f"*{kind}",
        "w": f"tensordesc<{kind}[1,{weight[0]},{weight[1]}]>" if tma else f"*{kind}",
        "y": f"*{kind}", "ends": "*i32", "k": "i32", "n": "i32", "experts": "i32",
    }  # fmt: skip
    given |= {"index": "*i32"} if gather else {}
    half = tiling.block_n // tiling.halves
    given |= {"y_tma": f"tensordesc<{kind}[{tiling.block_m},{half}]>"} if y_tma else {}
    constants = {
        "padded": 128, "x_tma": x_tma, "w_tma": tma, "y_tma_on": y_tma, "gather": gather,
        "k_major": k_major, "halves": tiling.halves, "y_tma": None, "index": None,
    }  # fmt: skip
    return build(grouped_tiles.rows_kernel, given, constants, tiling, ("k", "n") if tma else ())


def columns(tiling, kind="bf16", tma=True):
    """The wgrad kernel as `multiply_columns` launches it."""
    block = {"p": tiling.block_m, "q": tiling.block_n}
    given = {"out": f"*{kind}", "ends": "*i32", "m": "i32", "n": "i32", "experts": "i32"}
    for name, width in block.items():
        described = f"tensordesc<{kind}[{tiling.block_k},{width}]>"
        given[name] = described if tma else f"*{kind}"
    if tma:
        given["out_tma"] = f"tensordesc<{kind}[1,{tiling.block_m},{tiling.block_n}]>"
    constants = {
        "padded": 128, "tma": tma, "out_tma_on": tma, "out_tma": None,
    }  # fmt: skip
    return build(grouped_tiles.weights_kernel, given, constants, tiling, ("m", "n") if tma else ())


def build(kernel, given, constants, tiling, multiples):
    options = tiling.options()
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    every = {**constants, **options}
    constants = {name: value for name, value in every.items() if name not in given}
    return compile_kernel(kernel, given, constants, multiples=multiples, **launch)


def check_code(made, tensor_cores=True):
    assert made.local == 0, f"{made.local} bytes of local memory a thread: registers spill"
    assert made.shared <= 227 * 1024
    assert (made.count(r"wgmma\.mma_async") > 0) == tensor_cores
    assert not made.count("multimem")


@pytest.mark.parametrize("tiling", gm.HOPPER["forward"], ids=grouped.label)
def test_rows_compiled(tiling):
    """Forward, and dgrad in the other layout: TMA in, the tensor cores' products, no spills."""
    for k_major in (True, False):
        made = rows(tiling, k_major)
        check_code(made)
        assert made.count(r"cp\.async\.bulk\.tensor\.2d\.shared")
        assert made.count(r"cp\.async\.bulk\.tensor\.3d\.shared")
        assert bool(made.count(r"cp\.async\.bulk\.tensor\.2d\.global")) == tiling.store_tma


@pytest.mark.parametrize("tiling", gm.HOPPER["wgrad"], ids=grouped.label)
def test_columns_compiled(tiling):
    made = columns(tiling)
    check_code(made)
    assert made.count(r"cp\.async\.bulk\.tensor\.3d\.global")


def test_without_descriptors_compiled():
    """Odd widths, and fp32, which must not become TF32."""
    check_code(rows(gm.ODD, True, tma=False))
    check_code(columns(gm.ODD, tma=False))
    for made in (rows(gm.FULL, False, kind="fp32"), columns(gm.FULL, kind="fp32")):
        check_code(made, tensor_cores=False)
        assert not made.count("tf32")


BAD = {
    "widths": (torch.zeros(4, 8), torch.zeros(2, 9, 8), "found [4, 8] and [2, 9, 8]"),
    "dtypes": (torch.zeros(4, 8), torch.zeros(2, 8, 8).half(), "found torch.float32 and torch.f"),
    "layout": (torch.zeros(4, 8), torch.zeros(2, 8, 16)[:, :, ::2], "strides (128, 16, 2)"),
    "interpreter": (torch.zeros(4, 8), torch.zeros(2, 8, 8), "needs Triton's interpreter"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_a_reason(name):
    x, weight, message = BAD[name]
    with pytest.raises(KernelError) as raised:
        gm.grouped_matmul(x, weight, torch.tensor([1, 4], dtype=torch.int32))
    assert message in str(raised.value)


def test_ends_refused():
    x, weight = torch.zeros(4, 8), torch.zeros(2, 8, 8)
    assert "found torch.int64 [2]" in gm.can_run(x, weight, torch.tensor([1, 4]))
