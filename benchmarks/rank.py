"""One rank of a group, `python -m dynaflow_train.benchmarks.rank job.json`: runs its cases in turn.

A case that raises ends the rank: its peers may stand in a collective, and the process group is of
no use any more. The command starts another group for the cases that are left.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import threading
import time
import traceback
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from dynaflow_train.benchmarks.job import OF_HF, Job
from dynaflow_train.benchmarks.measure import CaseRun
from dynaflow_train.config import CONNECTIONS_VARIABLE, environment


def main(path: str) -> None:
    """Run the job written there."""
    job, rank = Job.load(Path(path)), environment().rank or 0
    _end_with(os.getppid())
    try:
        _run(job, rank)
    except BaseException as error:  # reported, then the rank ends
        traceback.print_exc()
        job.error(rank).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a collective that hangs must not keep this process


def _end_with(parent: int) -> None:
    """End when the command is gone, however it went: nobody would stop a rank that waits."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(job: Job, rank: int) -> None:
    cuda = job.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{job.scratch}/store", job.ranks)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.limit_s),
    )
    shape = (job.copies, job.ranks // job.copies)
    mesh = dist.device_mesh.init_device_mesh(job.device, shape, mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.zeros(1, device=device))
    if rank == 0:
        job.ready.touch()
    telling = dist.PrefixStore("bench", store)
    for name in job.cases:
        found = CaseRun(name, job, device, mesh["tp"], telling, mesh["dp"]).measure()
        if rank == 0:  # after every case: a run may be cut short
            _write(job, name, {**found, **_about(job, device)})
        del found
        torch._dynamo.reset()  # nothing compiled for one case is met by the next
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def _write(job: Job, name: str, content: dict[str, Any]) -> None:
    path = job.result(name)
    begun = path.with_suffix(".part")
    begun.write_text(json.dumps({"case": job.title(name), **content}), encoding="utf-8")
    begun.replace(path)  # whoever sees it sees all of it


def _about(job: Job, device: torch.device) -> dict[str, Any]:
    """Where and with what it was measured."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu"
    found = {each: metadata.version(each) for each in ("torch", "transformers")}
    if job.host not in OF_HF:
        found["megatron-core"] = metadata.version("megatron-core")
    found["python"] = platform.python_version()
    if cuda:
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl.version()))}
    return {
        "link": job.link,
        "connections": environment().variables.get(CONNECTIONS_VARIABLE),
        "ranks": job.ranks,
        "copies": job.copies,
        "rounds": job.rounds,
        "executor": job.executor,
        "device": name,
        "versions": found,
        "environment": dict(environment().variables),
        **job.note,
    }


if __name__ == "__main__":
    main(sys.argv[1])
