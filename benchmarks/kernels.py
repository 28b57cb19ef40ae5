"""Where a step's GPU time goes: kernels of torch.compile and of a strategy side by side.

Counts and names compare; times less: whoever comes first runs on a cooler chip, at higher clocks.

python -m benchmarks.kernels --case 8b-2x4096 --strategies sequential dual_batch
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from dynaflow_train.benchmarks.cases import CASES
from dynaflow_train.benchmarks.steps import Batch, Clock
from dynaflow_train.benchmarks.variants import Bed, variants


def worker(rank: int, options: argparse.Namespace) -> None:
    """Profile three steps of each variant on every rank; rank 0 prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    case = CASES[options.case]
    inputs, clock = case.inputs(device, torch.bfloat16), Clock(device)
    batch = Batch(inputs, torch.randn_like(inputs["inputs_embeds"]) / case.hidden**0.5)
    bed = Bed(case, device, torch.bfloat16, mesh, options.executor, clock)
    bed.batch = batch
    for variant in variants(options.strategies)[1:]:  # without eager
        name, step = variant.name, variant.make(bed)
        for _ in range(variant.warmups):
            step()
        dist.barrier()
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=kinds, acc_events=True) as found:
            for _ in range(3):
                times = clock.phases(step())
            torch.cuda.synchronize()
        if rank:
            continue
        total, count = Counter(), Counter()
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                total[event.name[:90]] += event.self_device_time_total / 3e3
                count[event.name[:90]] += 1
        print(f"\n== {name}: step {sum(times):.2f} ms, kernels {sum(total.values()):.2f} ms")
        for kernel, ms in total.most_common(options.top):
            print(f"{ms:8.3f} ms {count[kernel] / 3:6.1f}x  {kernel}", flush=True)
        cpu = Counter()
        for event in found.key_averages():
            cpu[event.key[:70]] += event.self_cpu_time_total / 3e3
        print("  CPU:", ", ".join(f"{k} {v:.2f}" for k, v in cpu.most_common(10)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="8b-2x4096")
    parser.add_argument("--strategies", nargs="+", default=["sequential"])
    parser.add_argument("--executor", default="inductor")
    parser.add_argument("--top", type=int, default=22)
    mp.spawn(worker, (parser.parse_args(),), 2)


if __name__ == "__main__":
    main()
