"""What every test shares: skips by what the machine has, few threads, a fresh start each."""

from __future__ import annotations

import os
import sys

# Before torch is imported, here and in the processes that tests start: two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)


def missing_devices(item: pytest.Item, found: int) -> str | None:
    """Why this machine cannot run the test, with numbers, or None."""
    needed = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("multigpu"):
        if len(marker.args) != 1 or not isinstance(marker.args[0], int):
            message = f"{item.nodeid}: write multigpu(n) with the number of devices it needs"
            raise pytest.UsageError(message)
        needed = max(needed, marker.args[0])
    if found >= needed:
        return None
    return f"needs {needed} CUDA device{'s' * (needed > 1)}, found {found}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found and os.environ.get("DYNAFLOW_TESTS_SHARE_GPU") == "1":
        found = 8  # correctness only: NCCL goes through sockets, processes take turns on the GPU
    for item in items:
        if reason := missing_devices(item, found):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh():
    """Same random numbers in every test, whatever ran before; nothing left compiled."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
