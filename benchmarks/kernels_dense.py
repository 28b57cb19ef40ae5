"""Dense kernels on two ranks: are they right, do they end, and do they win?

Checks every kernel, forward and backward, against fp32 on random shapes with late ranks, inside
CUDA graphs, and many times in a row; with two GPUs it then times them against cuBLAS + NCCL,
torch's fused operators and separate kernels, interleaved. Two ranks may share one GPU, for
correctness only. Exit status 1 if anything was wrong.

python -m benchmarks.kernels_dense --out kernels_dense.json
python -m benchmarks.kernels_dense --device cpu --shapes 4     # rehearsal, Triton interpreted
compute-sanitizer --tool memcheck --target-processes all python -m benchmarks.kernels_dense --few
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
PORT = 29_781
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def prepare_environment(device: str) -> bool:
    """For the children, before any of them loads CUDA or Triton; whether they share one GPU."""
    os.environ |= MULTICAST_OFF | {"NVSHMEM_DISABLE_NVLS": "1"}
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        return False
    if shared := torch.cuda.device_count() < WORLD:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return shared


def worker(rank: int, options: argparse.Namespace, shared: bool, port: int, out: str) -> None:
    """One rank: everything, then its findings to a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    on_gpu = options.device != "cpu"
    device = torch.device("cuda", 0 if shared else rank) if on_gpu else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if on_gpu and not shared else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=WORLD)
    found: dict[str, Any] = {"checks": [], "times": [], "wrong": []}
    try:
        measure(rank, options, device, shared, found)
    except Exception:
        found["wrong"].append(f"rank {rank}: {traceback.format_exc()}")
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    if not found["wrong"]:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(1 if found["wrong"] else 0)  # a rank that failed does not wait for the other


def measure(
    rank: int, options: argparse.Namespace, device: torch.device, shared: bool, found: dict
) -> None:
    """All checks, then times."""
    from dynaflow_train.benchmarks import dense_checks as checks
    from dynaflow_train.overlap_kernels.pool import Pool

    group = dist.distributed_c10d._get_default_group().group_name

    def ask(_: str, text: str) -> list[str]:
        texts: list[Any] = [None] * WORLD
        dist.all_gather_object(texts, text)
        return texts

    pool = Pool(device, ask, patience_s=options.patience)
    start, small = time.monotonic(), device.type == "cpu" or options.few
    ctas = (4, 12) if shared else (8, 64, 112)  # on a shared GPU both ranks' must fit beside
    shapes = 3 if options.few else options.shapes
    repeats = options.repeats or (50 if small else 300 if shared else 10_000)

    def left() -> float:
        """Seconds, the least of all ranks."""
        mine = options.seconds - (time.monotonic() - start)
        return min(float(text) for text in ask("", str(mine)))

    def note(what: str, kernel: str, number: int, wrong: list[str]) -> None:
        row = {"check": what, "kernel": kernel, "number": number, "wrong": len(wrong)}
        found["checks"].append(row | {"seconds": round(time.monotonic() - start, 1)})
        found["wrong"] += wrong
        if rank == 0:
            print(json.dumps(found["checks"][-1]), *wrong[:3], sep="\n", flush=True)

    for kernel in checks.KERNELS:
        cases = [
            checks.draw(kernel, seed, small=small, ctas=ctas, kinds=options.kinds)
            for seed in range(shapes)
        ]
        whole = max(checks.nbytes(case, WORLD) for case in cases)
        space = pool.take(kernel, group, "compute", max(whole, 1 << 20))
        wrong, done = [], 0
        share = options.seconds * (0.42 if kernel == "all_reduce_rms_norm" else 0.13)
        until = left() - share
        for seed, case in enumerate(cases):
            if seed % 8 == 0 and left() < until:
                break
            wrong.append(checks.wrong(case, rank, space, seed, late=0.05 if shared else 0.1))
            done += 1
        note("shapes", kernel, done, [each for each in wrong if each])
        if device.type == "cuda" and not options.few:
            picked = [cases[i] for i in (0, 1, 2, 4) if i < len(cases)]
            wrong = [checks.graph_wrong(case, rank, space, 8) for case in picked]
            note("graphs", kernel, len(picked), [each for each in wrong if each])
        wrong, tunings = [], (0, 1, 2) if kernel == "all_reduce_rms_norm" else (1,)
        for shots in tunings:
            tuning = dataclasses.replace(cases[0].tuning, shots=shots, ctas=12)
            case = dataclasses.replace(
                cases[0], rows=13, inner=24, width=64, tuning=tuning, dtype=torch.float32
            )
            wrong.append(checks.repeat_wrong(case, rank, space, repeats // len(tunings)))
        note("repeats", kernel, repeats, [each for each in wrong if each])
    timed = options.times == "yes" or (options.times == "auto" and device.type == "cuda")
    if timed and not shared and not options.few and not found["wrong"]:
        from dynaflow_train.benchmarks.dense_times import times

        found["times"] = times(rank, pool, group, left, options.tokens)
    pool.check()
    pool.close()


def main() -> None:
    """Start the ranks, join their findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", type=int, default=200, help="random shapes of each kernel")
    parser.add_argument("--kinds", type=int, default=6, help="norms, each compiled")
    parser.add_argument("--repeats", type=int, default=0, help="calls in a row; 0: as fits")
    parser.add_argument("--seconds", type=float, default=140.0, help="stop starting work after it")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds a kernel waits")
    parser.add_argument("--times", default="auto", choices=["auto", "yes", "no"])
    parser.add_argument("--tokens", type=int, default=8192, help="of the timed shapes")
    parser.add_argument("--few", action="store_true", help="a handful of calls, for a sanitizer")
    parser.add_argument("--out", default="kernels_dense.json")
    options = parser.parse_args()
    shared = prepare_environment(options.device)
    port = PORT + random.SystemRandom().randrange(1000)
    context = mp.get_context("spawn")
    given = (options, shared, port, options.out)
    ranks = [context.Process(target=worker, args=(rank, *given)) for rank in range(WORLD)]
    for rank, process in enumerate(ranks):
        os.environ["NCCL_HOSTID"] = f"rank{rank}" if shared else os.environ.get("NCCL_HOSTID", "")
        if not os.environ["NCCL_HOSTID"]:
            del os.environ["NCCL_HOSTID"]
        process.start()
    end = time.monotonic() + options.seconds + 60
    while any(p.is_alive() for p in ranks) and time.monotonic() < end:
        time.sleep(0.2)
        if any(p.exitcode not in (None, 0) for p in ranks):
            end = min(end, time.monotonic() + 10)
    for process in ranks:
        process.kill()
        process.join()
    sys.exit(report(options, shared, [process.exitcode for process in ranks]))


def report(options: argparse.Namespace, shared: bool, codes: list[int | None]) -> int:
    """JSON, and CSV of the times; the exit status."""
    found: list[dict[str, Any]] = []
    for rank in range(WORLD):
        path = Path(f"{options.out}.{rank}")
        if path.exists():
            found.append(json.loads(path.read_text()))
            path.unlink()
    wrong = [text for each in found for text in each["wrong"]]
    if any(codes) or len(found) < WORLD:
        wrong.append(f"exit codes of the ranks: {codes}, reports: {len(found)}")
    on_gpu = options.device == "cuda"
    device = torch.cuda.get_device_name(0) if on_gpu else "cpu"
    about = {"torch": torch.__version__, "device": device, "ranks": WORLD, "one_gpu": shared}
    result = {"about": about, "wrong": wrong}
    for key in ("checks", "times"):
        result[key] = found[0][key] if found else []
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    if result["times"]:
        with Path(options.out).with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, result["times"][0].keys())
            writer.writeheader()
            writer.writerows(result["times"])
    for row in result["times"]:
        print(row)
    print("\n".join(wrong[:10]) if wrong else "all right", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
