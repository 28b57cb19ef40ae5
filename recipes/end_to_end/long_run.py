"""The demo's model for 1,000 steps, dual batch in CUDA graphs against eager: losses and memory.

    python -m recipes.end_to_end.long_run --out folder                              # two GPUs
    python -m recipes.end_to_end.long_run --device cpu --steps 20 --out folder      # a rehearsal

Eager runs twice with one seed; once in halves, by the Trainer's own gradient accumulation over the
same samples, which adds gradients up in the order in which dual batch does; and once with
torch.compile for each layer, whose fused kernels round elsewhere, as ours do. These show how far
rounding and unordered sums alone carry equal trainings apart: ours must be as near to eager. Exit
status 1 if it is not, if memory grows, or if no graphs were used where there could be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from recipes.end_to_end import curves
from recipes.end_to_end.runs import GRAPH, RECIPES, Ran, Run, in_turn

OURS, EAGER, EXACT = "ours", "eager", "eager, fp32"
AGAIN, HALVES, COMPILED = "eager again", "eager in halves", "compiled"
REFERENCES = (EAGER, AGAIN, HALVES, COMPILED)
LARGE = {"batch": 64, "length": 512, "hidden": 512, "layers": 4}
TINY = {"batch": 4, "length": 32, "hidden": 64, "layers": 2}


def arguments() -> argparse.Namespace:
    """The command line, sizes filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--steps", type=int, default=1000)
    add("--settled", type=int, default=100, help="step from which on memory must be flat")
    for name in LARGE:
        add(f"--{name}", type=int, help=f"(default: {LARGE[name]}; on the CPU {TINY[name]})")
    add("--link", choices=("nvlink", "no-p2p"), default="nvlink")
    add("--fp32", action="store_true", help="also eager in fp32: how far bf16 itself is off")
    add("--limit", type=float, default=180.0, help="seconds a run may take")
    add("--total", type=float, default=1800.0, help="seconds all may take")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--out", type=Path, required=True)
    given = parser.parse_args()
    for name, size in (LARGE if given.device == "cuda" else TINY).items():
        if getattr(given, name) is None:
            setattr(given, name, size)
    if given.batch % 2:
        parser.error(f"--batch {given.batch} has no halves")
    if given.steps < 4:
        parser.error(f"--steps {given.steps}: a curve needs 4 at least")
    return given


def plan(given: argparse.Namespace) -> dict[str, Run]:
    """What runs, the most wanted first."""
    cuda = given.device == "cuda"
    demo = RECIPES / "demo" / ("recipe_gpu.yaml" if cuda else "recipe.yaml")
    sizes = ("steps", *LARGE)
    own = tuple(word for name in sizes for word in (f"--{name}", str(getattr(given, name))))
    own += ("--model", "demo", "--rate", "1e-3", "--look-every", str(max(1, given.steps // 20)))
    dtype, link = ("mixed" if cuda else "fp32"), (given.link if cuda else "gloo")
    ways = {
        EAGER: ("plain", dtype, 1),
        OURS: ("launch" + GRAPH, dtype, 1),
        AGAIN: ("plain", dtype, 1),
        HALVES: ("plain", dtype, 2),
        COMPILED: ("compile", dtype, 1),
    }
    if given.fp32:
        ways[EXACT] = ("plain", "fp32", 1)
    changes = {"verify": False}  # make demo's job; here it would take memory of its own
    return {
        name: Run(
            name=name.replace(",", "").replace(" ", "-"),
            mode=mode,
            link=link,
            device=given.device,
            recipe=demo,
            changes=changes,
            arguments=(*own, "--dtype", precision, "--parts", str(parts)),
        )
        for name, (mode, precision, parts) in ways.items()
    }


def graphs_used(ran: Ran, device: str) -> tuple[bool, str]:
    """Whether every phase was recorded, where it can be, and what is to be said of it."""
    told = ran.report.get("graphs", [])
    if told:
        used = all("CUDA graph" in text and "launch by launch" not in text for text in told)
        return used, "CUDA graphs: " + "; ".join(told)
    why = next((text for text in ran.says if "not recorded" in text), "no reason was given")
    return device != "cuda", f"no CUDA graph was used: {why}"


def memory(found: dict[str, Ran], settled: int) -> dict[str, dict[str, int] | None]:
    """Of each run, the growth of the rank that grew most."""
    grown: dict[str, dict[str, int] | None] = {}
    for name, ran in found.items():
        ranks = [g for r in ran.ranks if (g := curves.growth(r["memory"], settled)) is not None]
        grown[name] = {k: max(g[k] for g in ranks) for k in curves.FLAT} if ranks else None
    return grown


def verdict(given: argparse.Namespace, found: dict[str, Ran]) -> tuple[bool, list[str], Any]:
    """Whether all holds, in words, and in figures."""
    window = max(1, given.steps // 20)
    references = {name: found[name].losses for name in REFERENCES}
    judged = curves.judge(found[OURS].losses, references, window)
    recorded, graphs = graphs_used(found[OURS], given.device)
    grown = memory(found, min(given.settled, given.steps // 2))
    lines = [f"loss differences, moving average over {window} steps{'largest':>12}{'mean':>12}"]
    shown = {**judged.pairs, f"{OURS}, {EAGER}": judged.ours, "allowed": judged.allowed}
    if EXACT in found:
        exact = found[EXACT].losses
        for name in (EAGER, OURS):
            far = curves.distance(found[name].losses, exact, window)
            shown[f"{name}, {EXACT}"] = far
    lines += [f"{name:>47}{d.largest:>12.2e}{d.mean:>12.2e}" for name, d in shown.items()]
    repeats = "the same bit for bit" if judged.repeats else "not the same bit for bit"
    lines.append(
        f"eager run twice: {repeats}; allowed: {curves.FACTOR} times the largest of theirs"
    )
    ends = {name: curves.smoothed(ran.losses, window)[-1] for name, ran in found.items()}
    lines.append("at the end: " + ", ".join(f"{name} {loss:.4f}" for name, loss in ends.items()))
    lines += [graphs, *(_grown(name, each) for name, each in grown.items())]
    mine = grown[OURS]
    steady = curves.flat(mine) if mine is not None else given.device != "cuda"
    holds = {"curve": judged.inside, "graphs": recorded, "memory": steady}
    broken = [name for name, held in holds.items() if not held]
    lines.append(f"FAILED: {', '.join(broken)}" if broken else "holds")
    figures = dataclasses.asdict(judged) | {"holds": holds, "ends": ends, "window": window}
    return not broken, lines, figures | {"growth_bytes": grown, "graphs": graphs}


def _grown(name: str, grown: dict[str, int] | None) -> str:
    if grown is None:
        return f"memory of {name}: not measured, there is no device memory"
    parts = (f"{kind} {size / curves.MIB:+.1f} MiB" for kind, size in grown.items())
    return f"memory of {name}, growth once settled: {', '.join(parts)}"


def write(given: argparse.Namespace, found: dict[str, Ran], figures: Any) -> None:
    """What every rank noted, and the figures if there are any yet."""
    content = {
        "command": sys.argv,
        "settings": {k: str(v) for k, v in vars(given).items()},
        "figures": figures,
        "runs": {name: {"error": ran.error, "ranks": ran.ranks} for name, ran in found.items()},
    }
    (given.out / "long_run.json").write_text(json.dumps(content), encoding="utf-8")


def main() -> int:
    """Every run, then the verdict."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Ran] = {}
    runs = plan(given)
    for name, ran in zip(
        runs, in_turn(runs.values(), given.out, given.limit, given.total), strict=True
    ):
        found[name] = ran
        write(given, found, None)
        told = (
            f"{sum(ran.step_seconds):.1f} s for {given.steps} steps" if not ran.error else ran.error
        )
        print(f"{name}: {told}", flush=True)
    if any(ran.error for ran in found.values()):
        print("FAILED: no verdict without all runs")
        return 1
    holds, lines, figures = verdict(given, found)
    write(given, found, figures)
    print("\n".join(lines))
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
