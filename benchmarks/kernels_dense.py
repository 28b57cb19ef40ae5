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

from dynaflow_train.benchmarks import dense_checks as checks
from dynaflow_train.benchmarks.dense_times import times
from dynaflow_train.overlap_kernels.pool import Pool

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


class Findings:
    """What one rank measured, while there is time.

    Attributes:
        rank, options, shared: see `worker`.
        found: checks, times, and what was wrong.
    """

    def __init__(
        self, rank: int, options: argparse.Namespace, pool: Pool, shared: bool, found: dict
    ) -> None:
        self.rank, self.options, self.pool, self.shared = rank, options, pool, shared
        self.found, self.start = found, time.monotonic()
        self.on_gpu = pool.device.type == "cuda"
        self.small = options.few or not self.on_gpu
        self.group = dist.distributed_c10d._get_default_group().group_name

    def left(self) -> float:
        """Seconds, the least of all ranks."""
        mine = self.options.seconds - (time.monotonic() - self.start)
        return min(float(text) for text in self.pool.ask("", str(mine)))

    def note(self, what: str, kernel: str, number: int, wrong: list[str]) -> None:
        """One check."""
        wrong = [each for each in wrong if each]
        row = {"check": what, "kernel": kernel, "number": number, "wrong": len(wrong)}
        self.found["checks"].append(row | {"seconds": round(time.monotonic() - self.start, 1)})
        self.found["wrong"] += wrong
        if self.rank == 0:
            print(json.dumps(self.found["checks"][-1]), *wrong[:3], sep="\n", flush=True)

    def check(self, kernel: str) -> None:
        """Random shapes, CUDA graphs, many calls."""
        options, norms = self.options, kernel == "all_reduce_rms_norm"
        # On a shared GPU both ranks' grids must fit beside one another.
        ctas = (4, 12) if self.shared else (8, 64, 112)
        kinds: dict[str, Any] = {"small": self.small, "ctas": ctas, "kinds": options.kinds}
        number = 3 if options.few else options.shapes
        cases = [checks.draw(kernel, seed, **kinds) for seed in range(number)]
        size = max(checks.nbytes(case, WORLD) for case in cases)
        space = self.pool.take(kernel, self.group, "compute", max(size, 1 << 20))
        until = self.left() - options.seconds * (0.42 if norms else 0.13)
        wrong: list[str] = []
        for seed, case in enumerate(cases):
            if seed % 8 == 0 and self.left() < until:
                break
            late = 0.05 if self.shared else 0.1
            wrong.append(checks.wrong(case, self.rank, space, seed, late))
        self.note("shapes", kernel, len(wrong), wrong)
        if self.on_gpu and not options.few:
            picked = [cases[i] for i in (0, 1, 2, 4) if i < len(cases)]
            graphs = [checks.graph_wrong(case, self.rank, space, 8) for case in picked]
            self.note("graphs", kernel, len(picked), graphs)
        repeats = options.repeats or (50 if self.small else 300 if self.shared else 10_000)
        tunings = (0, 1, 2) if norms else (1,)
        wrong = []
        for shots in tunings:
            tuning = dataclasses.replace(cases[0].tuning, shots=shots, ctas=12)
            case = dataclasses.replace(
                cases[0], rows=13, inner=24, width=64, tuning=tuning, dtype=torch.float32
            )
            wrong.append(checks.repeat_wrong(case, self.rank, space, repeats // len(tunings)))
        self.note("repeats", kernel, repeats, wrong)


def measure(
    rank: int, options: argparse.Namespace, device: torch.device, shared: bool, found: dict
) -> None:
    """All checks, then times."""

    def ask(_: str, text: str) -> list[str]:
        texts: list[Any] = [None] * WORLD
        dist.all_gather_object(texts, text)
        return texts

    pool = Pool(device, ask, patience_s=options.patience)
    findings = Findings(rank, options, pool, shared, found)
    for kernel in checks.KERNELS:
        findings.check(kernel)
    timed = options.times == "yes" or (options.times == "auto" and findings.on_gpu)
    if timed and not shared and not options.few and not found["wrong"]:
        found["times"] = times(rank, pool, findings.group, findings.left, options.tokens)
    pool.check()
    pool.close()


def main() -> None:
    """Start the ranks, join their findings."""
    parser = argparse.ArgumentParser(description="dense kernels on two ranks")
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
    result: dict[str, Any] = {"about": about, "wrong": wrong}
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
