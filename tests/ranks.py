"""Runs one function on several ranks, each its own process, and says what became of each.

    def on_rank(rank: int, width: int) -> float: ...        # top level of a test file

    first, second = run_ranks(on_rank, 2, 64)                # a failing rank fails the test
    outcomes = try_ranks(on_rank, 2, 64)                     # ranks may fail, or be killed

A file store, no TCP port: tests run side by side. Forkserver: torch is imported once, not once a
rank. Return values and arguments are pickled; tensors arrive as copies.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

COLLECTIVE_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 150.0
GRACE_S = 15.0
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class Outcome:
    """What one rank came to: `value` if it returned, else `error`, its traceback or its death."""

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None


class RanksFailedError(AssertionError):
    """At least one rank failed; the message holds each one's traceback."""


def cuda_of(rank: int) -> torch.device:
    """A rank's GPU; ranks share GPUs where there are too few (`tests/conftest.py`)."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def _on_rank(setup: tuple[int, int, str, str], connection: Connection, payload: bytes) -> None:
    rank, world_size, store, backend = setup
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        os.environ["LOCAL_RANK"] = str(cuda_of(rank).index)
    if backend == "nccl" and world_size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # as if on hosts of their own: through sockets
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(cuda_of(rank))
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        fn, args = pickle.loads(payload)
        torch.manual_seed(0)
        connection.send_bytes(pickle.dumps(Outcome(rank, fn(rank, *args))))
    except BaseException:
        connection.send_bytes(pickle.dumps(Outcome(rank, error=traceback.format_exc())))
        connection.close()
        os._exit(1)  # a collective that hangs must not keep this process
    with contextlib.suppress(RuntimeError):  # another rank's failure is that rank's to report
        dist.barrier()
        dist.destroy_process_group()


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [name for name in PRELOAD if importlib.util.find_spec(name.partition(".")[0])]
    )
    return context


def _receive(connection: Connection, process: BaseProcess, rank: int) -> Outcome:
    """The rank's own report, or how it died without one."""
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(5)
        died = f"rank {rank} died without a report, exit code {process.exitcode}"
        return Outcome(rank, error=died, exitcode=process.exitcode)


def _collect(
    connections: Sequence[Connection],
    processes: Sequence[BaseProcess],
    timeout_s: float,
    grace_s: float | None,
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    start = time.monotonic()
    deadline = start + timeout_s
    while len(outcomes) < len(processes):
        waiting = [c for rank, c in enumerate(connections) if rank not in outcomes]
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(waiting, max(left, 0))
        if not ready:
            took = f"was still running after {time.monotonic() - start:.0f} s and was killed"
            for rank in range(len(processes)):
                outcomes.setdefault(rank, Outcome(rank, error=f"rank {rank} {took}"))
        for connection in ready:
            rank = next(r for r, c in enumerate(connections) if c is connection)
            outcomes[rank] = _receive(connections[rank], processes[rank], rank)
            if outcomes[rank].error and grace_s is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
    return [outcomes[rank] for rank in range(len(processes))]


def try_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = RUN_TIMEOUT_S,
    grace_s: float | None = None,
    backend: str = "gloo",
    spawn: bool = False,
) -> list[Outcome]:
    """Calls `fn(rank, *args)` on every rank and returns each one's outcome; raises nothing.

    A rank may fail, or kill itself with `os.kill(os.getpid(), signal.SIGKILL)`; the others have
    until `timeout_s`, or `grace_s` after the first failure, and are then killed.
    """
    # A forked process cannot start CUDA once its parent has looked for devices.
    fresh = spawn or backend != "gloo"
    context = multiprocessing.get_context("spawn") if fresh else _forkserver()
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        connections: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe(duplex=False)
                setup = (rank, world_size, f"{folder}/store", backend)
                process = context.Process(
                    target=_on_rank, args=(setup, theirs, payload), daemon=True
                )
                process.start()
                theirs.close()  # so that a dead rank reads as the end of its pipe
                connections.append(mine)
                processes.append(process)
            outcomes = _collect(connections, processes, timeout_s, grace_s)
            failed = any(outcome.error for outcome in outcomes)
            for process in processes:
                process.join(0 if failed else 5)  # beside a failed one, none leaves its barrier
            return outcomes
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = RUN_TIMEOUT_S,
    backend: str = "gloo",
    spawn: bool = False,
) -> list[Any]:
    """Calls `fn(rank, *args)` on every rank and returns the values, by rank.

    With `spawn` the processes read the environment anew, before they import anything.

    Raises:
        RanksFailedError: a rank raised, died or outlived `timeout_s`; holds every traceback.
    """
    outcomes = try_ranks(
        fn, world_size, *args, timeout_s=timeout_s, grace_s=GRACE_S, backend=backend, spawn=spawn
    )
    if errors := [f"--- rank {o.rank} ---\n{o.error}" for o in outcomes if o.error]:
        message = f"{len(errors)} of {world_size} ranks failed\n" + "\n".join(errors)
        raise RanksFailedError(message)
    return [outcome.value for outcome in outcomes]
