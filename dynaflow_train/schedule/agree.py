"""Ranks compare plans through a store, never through a collective: a lone rank must not hang."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from dynaflow_train.errors import PlanMismatchError

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch._C._distributed_c10d import Store


def agree(  # noqa: PLR0913 - two things to compare, and who compares them
    plan_hash: str,
    plan_text: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    key: str,
    timeout_s: float,
) -> None:
    """Return once every rank has published the same `plan_hash` under `key`.

    Args:
        plan_hash: what must be equal.
        plan_text: shown where it differs.
        store: of a process group with `world_size` ranks, of which this is `rank`.
        rank: this process.
        world_size: how many publish.
        key: the same on all ranks, used for one comparison only.
        timeout_s: how long to wait for the others, all together.

    Raises:
        PlanMismatchError: names the ranks that differ and the first line in which they do, or the
            ranks that did not answer in time.
    """
    with _told(rank, key):
        store.set(f"dynaflow/{key}/{rank}/text", plan_text)
    hashes = gather(
        plan_hash, store=store, rank=rank, world_size=world_size, key=key, timeout_s=timeout_s
    )
    if len(set(hashes)) > 1:
        with _told(rank, key):
            message = _difference(hashes, store, key)
        raise PlanMismatchError(message)


def gather(
    text: str, *, store: Store, rank: int, world_size: int, key: str, timeout_s: float
) -> list[str]:
    """The texts that all ranks publish under `key`, by rank.

    Args:
        text: this rank's.
        store: of a process group with `world_size` ranks, of which this is `rank`.
        rank: this process.
        world_size: how many publish.
        key: the same on all ranks, used once.
        timeout_s: how long to wait for the others, all together.

    Raises:
        PlanMismatchError: names the ranks that did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    keys = [f"dynaflow/{key}/{each}/hash" for each in range(world_size)]
    with _told(rank, key):
        store.set(keys[rank], text)
        silent = _silent(store, keys, deadline)
        if not silent:
            return [store.get(each).decode() for each in keys]
    raise PlanMismatchError(
        f"rank {rank} waited {timeout_s:g} s for the plan of {key}; {_ranks(silent)} of "
        f"{world_size} did not answer. A rank may have died, run another model or shape, "
        f"or may still compile: look at its log, or raise the time limit."
    )


@contextmanager
def _told(rank: int, key: str) -> Generator[None]:
    """Says what a failing store means."""
    try:
        yield
    except RuntimeError as error:  # all of torch's store errors
        raise PlanMismatchError(
            f"rank {rank} could not compare its plan of {key}: the process group's store failed "
            f"({error}). The rank that hosts it, mostly rank 0, may have died: look at its log."
        ) from error


def _silent(store: Store, keys: list[str], deadline: float) -> list[int]:
    """The ranks whose key is not set by the deadline.

    Asks again and again: `Store.wait` would keep the store from other threads of this process.
    """
    pause_s = 0.001
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > deadline:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return missing


def _difference(hashes: list[str], store: Store, key: str) -> str:
    """The message, the same on every rank: who differs from most, and where."""
    counts = Counter(hashes)
    usual = max(hashes, key=lambda each: counts[each])  # the first, where several are as frequent
    differing = [rank for rank, each in enumerate(hashes) if each != usual]
    other, one = hashes.index(usual), differing[0]
    texts = [
        store.get(f"dynaflow/{key}/{rank}/text").decode().splitlines() for rank in (other, one)
    ]
    where = "their plans read the same, but the graphs below them differ (ops or edges)"
    for number, (expected, found) in enumerate(zip_longest(*texts, fillvalue=""), 1):
        if expected != found:
            where = (
                f"first difference in line {number} of the plan:\n"
                f"  rank {other}: {expected.rstrip()}\n  rank {one}: {found.rstrip()}  <-- here"
            )
            break
    return (
        f"{_ranks(differing)} of {len(hashes)} made another plan for {key} than rank {other}; "
        f"{where}\nA plan may depend only on what is equal on all ranks: recipe, batch size, "
        f"sequence length, agreed times. 'sequential' is always valid."
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
