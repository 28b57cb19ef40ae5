"""Tensor-parallel overlap, whole step: eager, torch.compile, every strategy, collectives removed.

    python benchmarks/tp_overlap.py --out results.csv            # all cases, both links, all GPUs
    python benchmarks/tp_overlap.py --device cpu --cases tiny    # a rehearsal

All variants run in one process group, one step each in turn (interleaved), every step timed with
events, the slowest rank counted. Medians. H and E as docs/explain.md defines them.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

import dynaflow_train as df
from benchmarks.cases import CASES, Case, build

STRATEGIES = ("sequential", "comm_overlap", "dual_batch", "nanoflow")


class Timer:
    """Milliseconds of forward and backward of one step."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def stamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        if not self.cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b)

    def phases(self, stamps: tuple[Any, Any, Any]) -> tuple[float, float]:
        """(forward ms, backward ms); waits for the device."""
        a, b, c = stamps
        return self.between(a, b), self.between(b, c)


def step(model: Any, inputs: dict[str, Any], gradient: torch.Tensor, timer: Timer) -> tuple:
    """One step from a random output gradient; its three stamps. Does not wait for the device."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs["inputs_embeds"].grad = None
    a = timer.stamp()
    out = model(**inputs).last_hidden_state
    b = timer.stamp()
    out.backward(gradient)
    c = timer.stamp()
    return a, b, c


def variants(case: Case, device: torch.device, mesh: Any, options: argparse.Namespace) -> dict:
    """Name -> model."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    world = mesh.size()
    made: dict[str, Any] = {"eager": build(case, device, dtype, mesh=mesh)}
    compiled = build(case, device, dtype, mesh=mesh)
    without = build(case, device, dtype, cut=world)
    backend = "inductor" if options.executor == "inductor" else "aot_eager"
    for model in (compiled, without):
        for layer in model.layers:
            layer.compile(backend=backend)
    made |= {"compile": compiled, "compile, no collectives": without}
    for name in options.strategies:
        model = build(case, device, dtype, mesh=mesh)
        strategy, _, graph = name.partition("+")  # "dual_batch+graph"
        df.compile(model, strategy, executor=options.executor, cuda_graphs=bool(graph))
        made[name] = model
    return made


def peak_mib(run: Any, device: torch.device) -> float:
    """Reserved memory of a step beyond what is there before it, MiB."""
    if device.type != "cuda":
        return float("nan")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_reserved() - before) / 2**20


def copied_mib(run: Any) -> float:
    """Bytes written by copies in one step, from the profiler, MiB."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    total = 0.0
    for event in found.events():
        name = event.name
        if name in ("aten::copy_", "aten::cat") and event.input_shapes:
            shape = event.input_shapes[0]
            if shape and all(isinstance(size, int) for size in shape):
                size = 1
                for extent in shape:
                    size *= extent
                total += size * 2
    return total / 2**20


def worker(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    """One rank: all cases on one link."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        try:
            rows += measure(CASES[name], device, mesh, options)
        except Exception:
            traceback.print_exc()
            print(f"CASE FAILED {name} on rank {rank}", flush=True)
            raise
        if rank == 0:  # after every case: a run may be cut short
            path = Path(f"{options.out}.{options.link}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def measure(  # noqa: C901 - warm up, time, compare, report
    case: Case, device: torch.device, mesh: Any, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Interleaved medians of one case."""
    models, timer = variants(case, device, mesh, options), Timer(device)
    dtype = next(models["eager"].parameters()).dtype
    torch.manual_seed(1)
    inputs = case.inputs(device, dtype)
    gradient = torch.randn_like(inputs["inputs_embeds"]) / case.hidden**0.5
    begun: dict[str, float] = {}
    for name, model in models.items():
        started = time.perf_counter()
        timer.phases(step(model, inputs, gradient, timer))
        begun[name] = time.perf_counter() - started
        for _ in range(40 if name == "auto" else 4):  # until it has chosen, and is measured
            step(model, inputs, gradient, timer)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    align = torch.zeros(1, device=device)
    for _ in range(options.rounds):
        stamps = {}
        for name, model in models.items():
            # Ranks begin together, but the host is not stopped: in training it runs ahead.
            dist.all_reduce(align)
            stamps[name] = step(model, inputs, gradient, timer)
        for name, found in stamps.items():
            times[name].append(timer.phases(found))
    extra = {}
    for name, model in models.items():
        run = functools.partial(step, model, inputs, gradient, timer)
        extra[name] = {"peak_mib": peak_mib(run, device), "copied_mib": copied_mib(run)}
    errors = gradient_errors(models, inputs, gradient, timer)
    slowest = slowest_rank(times, device)
    rows = summarise(case, slowest, extra, errors, begun, options)
    if dist.get_rank() == 0:
        table(rows)
        for name in options.strategies:
            print(f"{name}: {df.explain(models[name]).hidden_share:.2f} of communication hidden")
            for text in (*df.explain(models[name]).choices, *df.explain(models[name]).graphs):
                print(text)
        if options.verbose and "dual_batch" in models:
            print(df.explain(models["dual_batch"]))
    del models
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def gradient_errors(models: dict, inputs: dict, gradient: torch.Tensor, timer: Timer) -> dict:
    """Relative difference of all gradients from eager's, by norm; eager against itself is noise."""

    def gradients(model: Any) -> torch.Tensor:
        step(model, inputs, gradient, timer)
        local = (
            getattr(p.grad, "_local_tensor", p.grad)
            for p in model.parameters()
            if p.grad is not None
        )
        return torch.cat([g.float().flatten() for g in local])

    plain = gradients(models["eager"])
    return {
        name: float((gradients(model) - plain).norm() / plain.norm())
        for name, model in models.items()
        if "no collectives" not in name
    }


def slowest_rank(times: dict, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Each round's times of the rank whose step took longest."""
    found = {}
    for name, pairs in times.items():
        mine = torch.tensor(pairs, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        stacked = torch.stack(everyone)  # rank, round, phase
        worst = stacked.sum(-1).argmax(0)
        picked = stacked[worst, torch.arange(len(pairs), device=device)]
        found[name] = [tuple(p) for p in picked.tolist()]
    return found


def summarise(
    case: Case, times: dict, extra: dict, errors: dict, begun: dict, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows with H and E."""
    whole = {name: statistics.median(f + b for f, b in pairs) for name, pairs in times.items()}
    phase = {
        name: [statistics.median(p[k] for p in pairs) for k in (0, 1)]
        for name, pairs in times.items()
    }
    base = min(("eager", "compile"), key=whole.__getitem__)
    bare = "compile, no collectives"
    limit = sum(max(w, b - w) for b, w in zip(phase[base], phase[bare], strict=True))
    rows = []
    for name, pairs in times.items():
        steps = sorted(f + b for f, b in pairs)
        gained = whole[base] - whole[name]
        ratios = sorted(
            (x[0] + x[1]) / (y[0] + y[1]) for x, y in zip(times[base], pairs, strict=True)
        )
        rows.append(
            {
                "case": case.name,
                "link": options.link,
                "variant": name,
                "ms": round(whole[name], 3),
                "p20": round(steps[len(steps) // 5], 3),
                "p80": round(steps[len(steps) * 4 // 5], 3),
                "forward_ms": round(phase[name][0], 3),
                "backward_ms": round(phase[name][1], 3),
                "speedup": round(statistics.median(ratios), 4),
                "H": round(gained / max(whole[base] - whole[bare], 1e-9), 3),
                "E": round(gained / max(whole[base] - limit, 1e-9), 3),
                "limit_ms": round(limit, 3),
                "first_step_s": round(begun[name], 1),
                "gradient_error": errors.get(name),
                **{k: round(v, 1) for k, v in extra[name].items()},
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
                "rounds": options.rounds,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    """Print."""
    head = rows[0]
    print(f"\n{head['case']}, {head['link']}, limit {head['limit_ms']} ms", flush=True)
    names = (
        "variant",
        "ms",
        "forward_ms",
        "backward_ms",
        "speedup",
        "H",
        "E",
        "peak_mib",
        "copied_mib",
        "first_step_s",
        "gradient_error",
    )
    print("  ".join(f"{n:>14}" for n in names))
    for row in rows:
        print("  ".join(f"{row[n]!s:>14.24}" for n in names), flush=True)


def main() -> None:
    """Run each link in processes of its own, then write one CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=[c for c in CASES if c != "tiny"])
    parser.add_argument("--links", nargs="+", default=["nvlink", "no-p2p"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--executor", default="inductor")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", default="benchmarks/results/tp_overlap.csv")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--link", help="internal: run one link in this process")
    options = parser.parse_args()
    if options.link:
        mp.spawn(worker, (options.world, 29400 + os.getpid() % 500, options), options.world)
        return
    rows: list[dict[str, Any]] = []
    for link in options.links if options.device == "cuda" else ["gloo"]:
        environment = os.environ | {
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
        }
        if link == "no-p2p":
            environment["NCCL_P2P_DISABLE"] = "1"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.tp_overlap", *sys.argv[1:], "--link", link],
            env=environment,
            check=False,
        )
        path = Path(f"{options.out}.{link}.json")
        if path.exists():
            rows += json.loads(path.read_text())
            path.unlink()
    if not rows:
        sys.exit("no case was measured")
    with Path(options.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
