"""Every dense Triton kernel compiles for Hopper without a GPU, to the PTX its protocol needs."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dynaflow_train.overlap_kernels.all_reduce_rms_norm import tile  # noqa: E402
from dynaflow_train.overlap_kernels.pool import SLOTS, triton_kernels  # noqa: E402

POINTERS = ("table", "flags", "epochs", "state", "host")
SIGNALS = {
    "table": "*i64", "flags": "*i64", "epochs": "*i32", "state": "*i32", "host": "*i32",
    "limit": "i32", "rank": "i32", "slot": "i32",
}  # fmt: skip


def compiled(kernel, signature, constants, warps):
    """The PTX and the resources that the assembler reports."""
    names = [p.name for p in kernel.params]
    types = {n: "constexpr" if n in constants else signature[n] for n in names}
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if str(types[n])[0] == "*"
    }
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, attrs)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1}
    )
    return made.asm["ptx"], made


def forward(norm, shots, *, width=8192, dtype="bf16", world=2):
    block, lines, warps = tile(width)
    data = dict.fromkeys(
        ("mine", "pulled", "residual", "weight", "bias", "summed", "total", "normed"), f"*{dtype}"
    )
    signature = SIGNALS | data | {"means": "*fp32", "scales": "*fp32", "eps": "fp32"}
    signature |= {"begin": "i32", "rows": "i32"}
    constants = {
        "WIDTH": width, "BLOCK": block, "ROWS": lines, "WORLD": world, "SLOTS": SLOTS,
        "NORM": norm, "SHOTS": shots, "HAS_SUM": shots == 1, "HAS_RESIDUAL": True,
        "HAS_BIAS": norm == "layer",
    }  # fmt: skip
    return compiled(triton_kernels().all_reduce_norm, signature, constants, warps)


def check(ptx, made, *, meets):
    acquires = len(re.findall(r"ld\.global\.sys\.acquire|ld\.acquire\.sys|acquire\.sys", ptx))
    acquires += len(re.findall(r"sys\.acquire", ptx))
    releases = len(re.findall(r"release\.exch|atom\S*sys\S*release|release\.sys", ptx))
    assert (acquires > 0) == (releases > 0) == (meets > 0)
    assert releases >= meets
    assert "multimem" not in ptx
    assert "cp.async.bulk" not in ptx  # a TMA store may be on its way when the flag is seen
    assert ".local" not in ptx
    for line in ptx.splitlines():  # all stores of a CTA come before its release
        if "release" in line:
            before = ptx[: ptx.index(line)]
            assert "bar.sync" in before
    assert getattr(made, "n_spills", 0) in (0, None)


@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
@pytest.mark.parametrize("shots", [0, 1, 2])
def test_the_fused_kernel(norm, shots):
    ptx, made = forward(norm, shots)
    check(ptx, made, meets=0 if shots == 0 else 2 * (shots + 1))
    assert re.search(r"ld\.global\.v4", ptx)  # rows of peers are read 16 bytes at a time
    assert re.search(r"st\.global\.v4", ptx)


def test_meet():
    kernel = triton_kernels().meet
    ptx, made = compiled(kernel, SIGNALS, {"WORLD": 4, "SLOTS": SLOTS}, 1)
    check(ptx, made, meets=4)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_backward(norm):
    block, lines, warps = tile(8192)
    data = dict.fromkeys(("total", "weight", "of_normed", "of_total", "of_input"), "*bf16")
    data |= dict.fromkeys(("means", "scales", "of_weight", "of_bias"), "*fp32")
    constants = {
        "WIDTH": 8192, "BLOCK": block, "ROWS": lines, "NORM": norm, "HAS_TOTAL": True,
        "HAS_BIAS": norm == "layer",
    }  # fmt: skip
    ptx, made = compiled(triton_kernels().norm_backward, data | {"rows": "i32"}, constants, warps)
    check(ptx, made, meets=0)
