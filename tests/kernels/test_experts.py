"""Dispatch and combine fused with the experts' products: in the interpreter, and compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels import expert_tiles
from dynaflow_train.overlap_kernels import experts as ex
from dynaflow_train.overlap_kernels import grouped_matmul as gm
from tests.kernels.compiling import compile_kernel
from tests.kernels.test_grouped_matmul import check_code, interpret, interpreter

TILING = gm.Tiling(128, 256, 64, 8, 3)
SPLIT = ex.Split(132, 16, *[TILING] * 3, wide=4, block_r=32, block_c=128, copied=512)


@interpreter
def test_one_rank_interpreted():
    """Against every expert for every token in plain torch, with gradients; top 1 to 8."""
    done = interpret("tests.kernels.one_rank")
    assert done.returncode == 0, done.stdout + done.stderr


@interpreter
@pytest.mark.dist
def test_two_ranks_interpreted():
    """The same over two processes, each late in turn; twice alike, bit by bit; one gone at last."""
    done = interpret("tests.kernels.two_ranks", "fp32", "7", "2", "2", "17", "9", "24")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("dweights") == 4
    assert "rank 0 gave up on rank 1" in done.stdout


def common(tiling, k_major):
    weight = (tiling.block_n, tiling.block_k) if k_major else (tiling.block_k, tiling.block_n)
    types = {"w": f"tensordesc<bf16[1,{weight[0]},{weight[1]}]>", "y": "*bf16"}
    types |= dict.fromkeys(("ends", "state", "host"), "*i32")
    types |= dict.fromkeys(("limit", "tokens", "k", "n", "experts", "rank"), "i32")
    return types, {"padded": 128, "w_tma": True, "k_major": k_major, **ex.shape_options(tiling)}


def build(kernel, types, constants):
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name not in types}
    return compile_kernel(kernel, types, constants, multiples={"k", "n"} & set(types), **launch)


@pytest.mark.parametrize("k_major", [True, False])
def test_dispatch_compiled(k_major):
    """Flags by release and acquire; what they cover leaves by plain wide stores, not by TMA."""
    types, constants = common(SPLIT.tiling, k_major)
    types |= {"peers": "*i64", "staged": "*bf16", "source": "*i32", "arrived": "*i32"}
    constants |= {"block_r": SPLIT.block_r, "block_c": SPLIT.copied}
    made = build(expert_tiles.dispatch_kernel, {**types, "copiers": "i32"}, constants)
    check_code(made)
    assert made.count(r"atom\.global\.gpu\.release\.add|atom\.\S*release\S*add")
    assert made.count(r"ld\.global\.\S*acquire|ld\.\S*acquire")
    assert made.count(r"st\.global\.v4")
    assert not made.count(r"st\.global\.b16")
    assert not made.count(r"cp\.async\.bulk\.tensor\.\dd\.global")


@pytest.mark.parametrize("world", [1, 2])
def test_combine_compiled(world):
    types, constants = common(SPLIT.tiling, True)
    types |= {"x": "*bf16", "out": "*bf16", "positions": "*i32", "weights": "*fp32"}
    types |= {"counts": "*i32", "epoch": "*i32", "makers": "i32", "senders": "i32"}
    types |= {"slots": "*i64", "flags": "*i64"} if world > 1 else {}
    constants |= {"weighted": True, "top": 8, "world": world, "flags_a_rank": 256}
    constants |= {"wide": SPLIT.wide, "block_t": SPLIT.block_r, "block_c": SPLIT.block_c}
    made = build(expert_tiles.combine_kernel, types, {**constants, "slots": None, "flags": None})
    check_code(made)
    assert made.count(r"atom\S*\.release\.\S*add|atom\S*release\S*add")
    assert bool(made.count(r"atom\S*sys\S*release\S*exch|atom\S*release\S*sys\S*exch")) == (
        world > 1
    )
    assert not made.count(r"st\.global\.b16")
    assert not made.count(r"cp\.async\.bulk\.tensor\.\dd\.global")


def test_routing():
    """Rows by expert, then rank, then token; an expert that is elsewhere has row -1."""
    chosen = torch.tensor([[[0, 2], [3, 1]], [[2, 3], [1, 0]]])
    first, second = (ex.route(chosen, 2, rank) for rank in range(2))
    assert first.ends.tolist() == [2, 4]
    assert first.source.tolist()[:4] == [0, 3, 1, 3]
    assert second.source.tolist()[:4] == [0, 2, 1, 2]
    assert first.positions.tolist() == [[[0, -1], [-1, 2]], [[-1, -1], [3, 1]]]
    assert second.positions.tolist() == [[[-1, 0], [2, -1]], [[1, 3], [-1, -1]]]


def test_refused_with_a_reason(monkeypatch):
    routing = ex.route(torch.zeros(2, 3, 1, dtype=torch.long), 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # checks come before any kernel
    x, weight = torch.zeros(3, 8), torch.zeros(2, 8, 8)
    with pytest.raises(KernelError, match="over 2 ranks needs a space"):
        ex.dispatch_matmul(x, weight, routing)
    routing = ex.route(torch.zeros(1, 3, 1, dtype=torch.long), 2)
    with pytest.raises(KernelError, match=r"must be fp32 \[1, 3, 1\], found torch.float32 \[3\]"):
        ex.combine_matmul(x, weight, torch.zeros(3), routing)


def test_scale_compiled():
    types = dict.fromkeys(("plain", "x", "dx", "scaled"), "*bf16")
    types |= {"weights": "*fp32", "dweights": "*fp32", "slot": "*i64", "ends": "*i32"}
    constants = {"block_r": 8, "block_c": 256, "num_warps": 4, "num_stages": 3}
    made = build(expert_tiles.scale_kernel, {**types, "experts": "i32", "k": "i32"}, constants)
    check_code(made, tensor_cores=False)
    assert made.count(r"st\.global\.v4") == 4
