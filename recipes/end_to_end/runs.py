"""One training as a process of its own, `accelerate launch` and all, and what it left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dynaflow_train.config import MULTICAST_OFF, Recipe, for_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent
GRAPH = "+graph"
MODES = ("launch", "plain", "compile", f"launch{GRAPH}", "callback")  # the most wanted first
LINKS = {"cuda": ("no-p2p", "nvlink"), "cpu": ("gloo",)}
RECIPE_FOR = {
    "no-p2p": RECIPES / "llama_tp2.yaml",
    "nvlink": RECIPES / "llama_tp2_nvlink.yaml",
    "gloo": RECIPES / "demo" / "recipe.yaml",
}
ACCELERATE = RECIPES / "demo" / "accelerate.yaml"  # two processes, TP 2; train.py sets the dtype
RANKS = 2
LEAST_S = 30.0  # a run takes as long until its first step
STOPPING_S = 45.0  # accelerate's agent gives its ranks 30 s

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Run:
    """What to start.

    Attributes:
        name: of its folder. mode: one of MODES; "+graph" records CUDA graphs.
        link: "nvlink" (whatever NCCL finds), "no-p2p" (through host memory), or "gloo".
        recipe: a file. changes: what is otherwise in this run, by key.
        arguments: train.py's own.
    """

    name: str
    mode: str
    link: str
    device: Device
    recipe: Path
    changes: Mapping[str, Any]
    arguments: tuple[str, ...]

    def command(self, folder: Path) -> list[str]:
        """From accelerate to the script's last argument."""
        accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        accelerate += [str(ACCELERATE), "--main_process_port", "0"]
        recipe, mode = str(self._recipe(folder)), self.mode.removesuffix(GRAPH)
        script = [str(HERE / "start.py"), mode, "--recipe", recipe]
        if mode == "launch":
            script = ["-m", "dynaflow_train.launch", "--recipe", recipe, str(HERE / "train.py")]
        return [*accelerate, *script, "--output", str(folder), *self.arguments]

    def _recipe(self, folder: Path) -> Path:
        """The file itself, or one with what this run changes."""
        graphs = {"cuda_graphs": True} if self.mode.endswith(GRAPH) else {}
        changes = {**self.changes, **graphs}
        if not changes:
            return self.recipe
        path = folder / "recipe.yaml"
        dataclasses.replace(Recipe.load(self.recipe), **changes).dump(path)
        return path

    def environment(self, folder: Path) -> dict[str, str]:
        """Links, and what the ranks share."""
        found = MULTICAST_OFF | {"DYNAFLOW_CACHE": "off", "TOKENIZERS_PARALLELISM": "false"}
        found["PYTHONPATH"] = os.pathsep.join([str(RECIPES.parent), *sys.path[1:]])
        if self.link == "no-p2p":
            found["NCCL_P2P_DISABLE"] = "1"
        if self.device == "cpu":
            found |= {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
            found |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        else:  # NCCL says there which way it goes
            found |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p.txt")}
        return for_child(found)


@dataclass(frozen=True)
class Ran:
    """What a run left.

    Attributes:
        ranks: what each rank's Watch wrote. begun: when the command was started.
        report: of dynaflow, {} for the runs without.
        transports: what NCCL said its channels go through.
        says: what dynaflow said it captured, or warned of.
        error: why it failed, or None.
    """

    run: Run
    begun: float
    ranks: tuple[dict[str, Any], ...] = ()
    report: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    transports: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    error: str | None = None

    @property
    def losses(self) -> list[float]:
        """Of each step, the same on every rank."""
        return self.ranks[0]["losses"]

    @property
    def step_seconds(self) -> list[float]:
        """From each step's end to the next one's, of the rank that took longest."""
        each = [
            [b - a for a, b in zip(r["ended"], r["ended"][1:], strict=False)] for r in self.ranks
        ]
        return [max(seconds) for seconds in zip(*each, strict=True)]


def in_turn(runs: Iterable[Run], out: Path, limit_s: float, total_s: float) -> Iterator[Ran]:
    """Each run once the one before is through; those that the time is not enough for say so."""
    end = time.monotonic() + total_s
    for run in runs:
        left = end - time.monotonic()
        if left < LEAST_S:
            yield Ran(run, 0.0, error=f"not started: the {total_s:.0f} s of --total are over")
        else:
            print(f"{run.name} ...", flush=True)
            yield start(run, out, min(limit_s, left))


def start(run: Run, out: Path, limit_s: float) -> Ran:
    """Run it to its end, or to its limit; nothing of it is left running.

    Args:
        run: what to start.
        out: where its folder goes; one of an earlier run is removed.
        limit_s: seconds it may take.
    """
    folder = out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, begun = folder / "log.txt", time.monotonic()
    with log.open("wb") as text:
        process = subprocess.Popen(
            run.command(folder), stdout=text, stderr=subprocess.STDOUT, env=run.environment(folder)
        )
        error = None
        try:
            if code := process.wait(limit_s):
                error = f"exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"took longer than {limit_s:.0f} s"
        finally:
            _stop(process)
    return _read(run, folder, begun, error)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its ranks are in sessions of their own: accelerate itself must have the time to end them."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(run: Run, folder: Path, begun: float, error: str | None) -> Ran:
    said = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    if error:
        return Ran(run, begun, error=f"{error}: {_cause(said)} (see {folder / 'log.txt'})")
    paths = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    ranks = tuple(json.loads(path.read_text(encoding="utf-8")) for path in paths)
    report = folder / "dynaflow" / "report.json"
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    ways = _transports(folder)
    if run.link == "no-p2p" and any(way.startswith("P2P") for way in ways):
        error = f"NCCL_P2P_DISABLE=1 was set, yet NCCL's channels go through {', '.join(ways)}"
    says = [line.partition("dynaflow: ")[2] for line in said if "dynaflow: " in line]
    says += [line.partition("Warning: ")[2] for line in said if "DynaFlowWarning: " in line]
    return Ran(run, begun, ranks, found, ways, tuple(dict.fromkeys(says)), error)


def _cause(said: list[str]) -> str:
    """The last line that names an exception; torch's own about its ranks say nothing."""
    named = [line for line in said if re.search(r"^(\[rank\d+\]: ?)?[\w.]*(Error|Exit)\b", line)]
    told = [line for line in named if not re.search("ChildFailed|SignalException", line)]
    return next(reversed(told or said), "it said nothing").strip()[:300]


def _transports(folder: Path) -> tuple[str, ...]:
    """Such as "P2P/CUMEM" or "SHM/direct/direct", from lines "... 0[0] -> 1[1] via ..."."""
    text = "".join(path.read_text(errors="replace") for path in folder.glob("nccl.*.txt"))
    return tuple(sorted(set(re.findall(r"-> \d+\S* (?:\[\w+\] )?via (\S+)", text))))
