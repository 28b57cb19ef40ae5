"""What this machine has, and what will not work on it and why.

`examine` looks, `problems` judges what was seen: the second takes plain values, so that every
verdict is tested on any machine.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata, util
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.cuda import nccl

from .config import MULTICAST_OFF, Environment, environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGES = ("torch", "triton", "transformers", "accelerate", "megatron-core", "numpy")
OLDEST = {
    "torch": (2, 11),
    "transformers": (5, 17),
    "accelerate": (1, 15),
    "megatron-core": (0, 19),
}

Severity = Literal["broken", "missing", "slow", "note"]


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        python: its version. packages: installed version of each of `PACKAGES`, or None.
        compiler: path of the C++ compiler that Inductor calls on the CPU, or None.
        gpus: name, memory and compute capability of each CUDA device.
        peers: for each pair (i, j) of devices whether i reaches j's memory directly.
        nccl: version of NCCL, or None. gloo: whether torch.distributed has it.
        environment: the variables that matter.
    """

    python: tuple[int, ...]
    packages: Mapping[str, str | None]
    compiler: str | None = None
    gpus: tuple[str, ...] = ()
    peers: Mapping[tuple[int, int], bool] = field(default_factory=dict[tuple[int, int], bool])
    nccl: str | None = None
    gloo: bool = True
    environment: Environment = field(default_factory=Environment)


@dataclass(frozen=True)
class Problem:
    """One thing to know: "broken" stops everything, "missing" takes something away."""

    severity: Severity
    text: str


def examine() -> Machine:
    """Looks at this machine; touches no process group and allocates nothing on a device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = itertools.permutations(range(count), 2)
    has_nccl = count > 0 and dist.is_nccl_available()
    return Machine(
        python=tuple(sys.version_info[:3]),
        packages={name: _version(name) for name in PACKAGES},
        compiler=_compiler(),
        gpus=tuple(_gpu(index) for index in range(count)),
        peers={pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs},
        nccl=".".join(map(str, nccl.version())) if has_nccl else None,
        gloo=dist.is_available() and dist.is_gloo_available(),
        environment=environment(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "megatron-core" and util.find_spec("megatron") is not None:
            return "of unknown version (a source folder)"
        return None


def _compiler() -> str | None:
    from torch._inductor import config  # noqa: PLC0415 - a second of import, for this one name

    names = config.cpp.cxx
    found = (shutil.which(name) for name in names if isinstance(name, str))
    return next((path for path in found if path), None)


def _gpu(index: int) -> str:
    seen = torch.cuda.get_device_properties(index)
    return f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, sm_{seen.major}{seen.minor}"


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> release("2.13.0+cpu"), release("5.17.0.dev0"), release("of unknown version")
    ((2, 13), (5, 17), ())
    """
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in itertools.takewhile(str.isdigit, parts))


def problems(machine: Machine) -> list[Problem]:
    """What will not work, or not well, and why; the worst first."""
    found = [*_software(machine), *_hardware(machine), *_variables(machine)]
    order: list[Severity] = ["broken", "missing", "slow", "note"]
    return sorted(found, key=lambda problem: order.index(problem.severity))


def _software(machine: Machine) -> Iterator[Problem]:
    packages = machine.packages
    for package, oldest in OLDEST.items():
        version = packages.get(package)
        seen = release(version) if version else ()
        if seen and seen < oldest:
            need = ".".join(map(str, oldest))
            severity: Severity = "broken" if package == "torch" else "missing"
            yield Problem(severity, f"{package} {version} is refused: needs {need} or newer.")
    torch_version = packages.get("torch") or ""
    if release(torch_version) == (2, 11):
        yield Problem(
            "note",
            f"torch {torch_version} computes wrong gradients for autograd.Functions that write "
            "in place into what they return; captures work around it. torch 2.13 is right.",
        )
    if not packages.get("transformers"):
        text = "transformers is not installed: recipes with host hf need the extra [hf]."
        yield Problem("missing", text)
    if not packages.get("megatron-core"):
        python = ".".join(map(str, machine.python[:2]))
        why = f" (its 0.19 asks for Python 3.12, this is {python})" * (machine.python < (3, 12))
        yield Problem("missing", f"megatron-core is not installed{why}: no Megatron host.")
    if packages.get("accelerate"):
        yield Problem(
            "note",
            "accelerate and Trainer know a fixed list of Dynamo backends: 'dynamo_backend: "
            "dynaflow' and torch_compile_backend='dynaflow' are refused by them. Use the "
            "launcher (accelerate launch -m dynaflow_train.launch) or DynaFlowCallback.",
        )
    if machine.compiler is None:
        yield Problem(
            "missing",
            "no C++ compiler (g++): Inductor cannot compile for the CPU. Install one, or set "
            "'executor: eager' in the recipe.",
        )


def _hardware(machine: Machine) -> Iterator[Problem]:
    if not machine.gloo:
        text = "torch.distributed has no gloo: several ranks on the CPU cannot run."
        yield Problem("missing", text)
    if not machine.gpus:
        text = "no CUDA device: plans run on the CPU over gloo; Triton kernels do not run."
        yield Problem("note", text)
    elif len(machine.gpus) == 1:
        yield Problem("note", "one CUDA device: tensor parallelism over NCCL needs 2, found 1.")
    if machine.gpus and machine.nccl is None:
        yield Problem("broken", "this torch has no NCCL: GPUs cannot communicate.")
    if machine.gpus and not machine.packages.get("triton"):
        yield Problem("missing", "triton is not installed: Inductor cannot compile for GPUs.")
    if apart := sorted(pair for pair, direct in machine.peers.items() if not direct):
        yield Problem(
            "slow",
            f"no peer access {', '.join(f'{i}->{j}' for i, j in apart)}: NCCL goes through host "
            "memory and kernels that use symmetric memory or peer copies do not run. Cutting the "
            "batch (dual_batch) gains most on such links.",
        )


def _variables(machine: Machine) -> Iterator[Problem]:
    seen = machine.environment
    off = [name for name, value in MULTICAST_OFF.items() if seen.variables.get(name) == value]
    rest = [f"{name}={value}" for name, value in MULTICAST_OFF.items() if name not in off]
    if off and not seen.multicast_off:
        text = f"NVLink multicast is off for {', '.join(off)} only; also set {', '.join(rest)}."
        yield Problem("note", text)
    if len(machine.gpus) > 1 and not off:
        text = f"NVLink multicast is on. Where it is forbidden or hangs, set {' '.join(rest)}."
        yield Problem("note", text)
    if seen.p2p_off:
        yield Problem(
            "slow",
            "NCCL_P2P_DISABLE=1: NCCL goes through host memory. Symmetric memory ignores it: "
            "compare the two only with NCCL on both sides.",
        )
    if seen.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Problem(
            "slow",
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so kernels "
            "start in the order of issue and overlap depends on it. Unset it unless the host "
            "asks for it.",
        )
    for name in seen.unknown:
        yield Problem("note", f"{name} is set, and nothing reads it.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def report(machine: Machine) -> str:
    """Machine and problems as text for a terminal."""
    rows = [("python", ".".join(map(str, machine.python)))]
    rows += [(name, version or "not installed") for name, version in machine.packages.items()]
    rows += [("C++ compiler", machine.compiler or "none"), ("NCCL", machine.nccl or "none")]
    rows.append(("gloo", _yes(machine.gloo)))
    rows += [(f"GPU {i}", text) for i, text in enumerate(machine.gpus)] or [("GPU", "none")]
    rows += [(f"P2P {i}->{j}", _yes(direct)) for (i, j), direct in machine.peers.items()]
    variables = machine.environment.variables
    rows += [(name, variables.get(name, "unset")) for name in MULTICAST_OFF]
    rows += [(name, value) for name, value in variables.items() if name not in MULTICAST_OFF]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    verdicts = [f"{problem.severity:>8}: {problem.text}" for problem in problems(machine)]
    return "\n".join([*lines, "", *(verdicts or ["nothing stands in the way"])])
