"""What is read off a trace: hidden time, copies, peers."""

from __future__ import annotations

import pytest
import torch

from dynaflow_train.benchmarks import profiling
from dynaflow_train.benchmarks.steps import Clock

NCCL, GEMM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "nvjet_tst_128x256"


def kernel(name, stream, start, end, **args):
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    args |= {"stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def test_hidden_is_what_runs_beside_kernels_of_other_streams():
    events = [
        kernel(NCCL, 20, 0, 10_000),
        kernel(GEMM, 7, 4_000, 6_000),
        kernel(GEMM, 8, 5_000, 7_000),  # overlaps the one above: 4 to 7 are hidden
        kernel(GEMM, 20, 8_000, 9_000),  # on its own stream: hides nothing
        kernel(NCCL, 21, 1_000, 3_000),  # beside another collective only
    ]
    found = profiling.communication(events)
    assert found.ms * profiling.REPEATS == pytest.approx(10 + 2)
    assert found.hidden_ms * profiling.REPEATS == pytest.approx(3)


def test_names_of_kernels_that_only_copy():
    moves = ("triton_poi_fused_clone_0", "triton_poi_fused__unsafe_view_clone_transpose_12",
             "triton_per_fused_cat_3", "triton_poi_fused_copy__5")  # fmt: skip
    computes = ("triton_poi_fused_add_clone_1", "triton_poi_fused__to_copy_0", GEMM,
                "triton_poi_fused_view_2", "triton_red_fused_cat_mean_mul_4")  # fmt: skip
    assert [name for name in (*moves, *computes) if profiling.only_copies(name)] == list(moves)


def operator(name, key, dims, kinds):
    args = {"External id": key, "Input Dims": dims, "Input type": kinds}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 1, "args": args}


def test_bytes_of_copies_come_from_the_copy_or_from_its_operator():
    bf16 = "c10::BFloat16"
    events = [
        kernel("Memcpy DtoD (Device -> Device)", 7, 0, 1, bytes=1000, **{"External id": 1}),
        operator("aten::copy_", 2, [[4, 8], [4, 8], []], [bf16, bf16, "Scalar"]),
        kernel("void at::native::direct_copy_kernel_cuda()", 7, 2, 3, **{"External id": 2}),
        operator("aten::cat", 3, [[[2, 3], [5, 3]], []], ["TensorList", "Scalar"]),
        kernel("void at::native::CatArrayBatchedCopy<x>()", 7, 4, 5, **{"External id": 3}),
        operator("triton_poi_fused_clone_0", 4, [[6], [3, 2], []], [bf16, "float", "Scalar"]),
        kernel("triton_poi_fused_clone_0", 7, 6, 7, **{"External id": 4}),
        kernel(GEMM, 7, 8, 9, **{"External id": 5}),
    ]
    found = profiling.copies(events, item_bytes=2)
    assert found.count * profiling.REPEATS == 4
    assert found.size is not None
    assert found.size * profiling.REPEATS == 1000 + 32 * 2 + 21 * 2 + 6 * 4


def test_a_copy_inside_a_graph_has_a_count_but_no_bytes():
    found = profiling.copies([kernel("triton_poi_fused_clone_0", 7, 0, 1)], item_bytes=2)
    assert (found.count * profiling.REPEATS, found.size) == (1, None)


@pytest.mark.parametrize(
    "name", ["Memcpy PtoP (Device -> Device)", "two_shot_all_reduce_kernel", "barrier_kernel"]
)
def test_peer_copies_and_symmetric_memory_are_seen(name):
    assert profiling.peers([kernel(NCCL, 7, 0, 1), kernel(name, 7, 2, 3)]) == [name]
    assert profiling.peers([kernel(NCCL, 7, 0, 1), kernel(GEMM, 7, 2, 3)]) == []


def test_copies_of_a_real_trace_on_the_cpu():
    x = torch.ones(10, 20)
    plain = profiling.copies(profiling.record(lambda: x + x, Clock(x.device)), 4)
    assert (plain.count, plain.size) == (0, 0)
    found = profiling.copies(profiling.record(lambda: x.t().contiguous(), Clock(x.device)), 4)
    assert (found.count, found.size) == (1, 800)
    joined = profiling.copies(profiling.record(lambda: torch.cat([x, x]), Clock(x.device)), 4)
    assert (joined.count, joined.size) == (1, 1600)
