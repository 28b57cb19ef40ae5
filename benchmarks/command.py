"""`dynaflow bench`: reads the command line, runs a group for each link, writes what was found."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.benchmarks import cases
from dynaflow_train.benchmarks.job import HF, HOSTS, OF_HF, SINGLE, Job
from dynaflow_train.errors import RecipeError, UnsupportedError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

LINKS = {"cuda": ("nvlink", "no-p2p"), "cpu": ("gloo",)}  # of several ranks
MOST_CONNECTIONS = 32
LEAST_ROUNDS = 20  # below, it is a rehearsal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `dynaflow bench` takes."""
    add = parser.add_argument
    add("--cases", nargs="+", default=["all"], help="names, with * for anything (default: all)")
    add("--host", choices=HOSTS, default=HF, help="whose layers (default: hf, transformers')")
    add(
        "--links",
        nargs="+",
        help="nvlink no-p2p, on the CPU gloo (default: all of the device); single: one rank, whose "
        "collectives move nothing (default where there is one GPU)",
    )
    add("--connections", nargs="+", type=int, help="values of CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32")
    add(
        "--strategies",
        nargs="+",
        help="'name parameter=value', then '+graph' for CUDA graphs, '+ctas=8' for NCCL's limit, "
        "'+copies' for the copy engine",
    )
    add("--rounds", type=int, default=LEAST_ROUNDS, help="steps of each variant (default: 20)")
    add("--ranks", "--world", type=int, help="(default: all GPUs; 2 on the CPU)")
    add("--device", choices=tuple(LINKS), help="(default: cuda where there is one)")
    add("--executor", choices=("inductor", "eager"), default="inductor")
    add("--ablation", action="store_true", help="also turn off one thing at a time")
    add("--cold", action="store_true", help="compile each variant with an empty cache")
    add("--limit", type=float, default=900.0, help="seconds that one case may take (default: 900)")
    add("--out", type=Path, default=Path("benchmarks/results/bench"), help="folder")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--no-charts", action="store_true", help="no pictures, no matplotlib")
    add("--list", action="store_true", help="list the cases and stop")


def run(given: argparse.Namespace, typed: Sequence[str], say: Callable[[str], None]) -> int:
    """Measure what was asked for.

    Args:
        given: the arguments.
        typed: the same as they were typed, for the results.
        say: gets each case's table as soon as it is there.

    Returns:
        0, or 1 where a case or a variant failed.

    Raises:
        RecipeError: a case, link, strategy or number that cannot be.
        UnsupportedError: too few devices, or a package that is missing.
    """
    if given.list:
        say("\n".join(cases.CASES))
        return 0
    _check_host(given.host)
    from dynaflow_train.benchmarks import chart, group, report  # noqa: PLC0415 - need transformers

    jobs = _jobs(given, typed)
    job = jobs[0]
    if not given.no_charts:
        chart.check()
    job_folder = Path(job.out)
    job_folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    judged: list[report.Judged] = []
    failures: dict[str, str] = {}

    def seen(path: Path) -> None:
        result = json.loads(path.read_text(encoding="utf-8"))
        results.append(result)
        judged.append(report.judge(result))
        report.write(judged, results, failures, job_folder)
        say(report.table(judged[-1]) + "\n")

    for each in jobs:
        for case, error in group.run(each, seen).items():
            failures[f"{case} {each.place}"] = error
            say(f"{case}, {each.place}: FAILED: {error}\n")
    if results:
        report.write(judged, results, failures, job_folder)
    for case in dict.fromkeys(each.case for each in judged if not given.no_charts):
        chart.draw([each for each in judged if each.case == case], job_folder / f"{case}.svg")
    broken = [
        f"{each.case} {each.place} {name}"
        for each, result in zip(judged, results, strict=True)
        for name in result["failed"]
    ]
    say(f"{len(results)} of {len(jobs) * len(job.cases)} cases measured; {job_folder}/results.csv")
    if failures or broken:
        say(f"failed: {', '.join([*failures, *broken])}")
    return int(bool(failures or broken))


def _check_host(host: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "the cases are layers of transformers, which is not installed: "
            "pip install 'dynaflow-train[hf]'"
        )
    if host not in OF_HF and importlib.util.find_spec("megatron") is None:
        raise UnsupportedError(
            f"--host {host} needs megatron-core, which is not installed: docs/megatron.md says how"
        )


def _jobs(given: argparse.Namespace, typed: Sequence[str]) -> list[Job]:
    """One for each link and number of connections; everything checked before a process starts."""
    from dynaflow_train.benchmarks import variants  # noqa: PLC0415 - needs transformers

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    devices = torch.cuda.device_count() if device == "cuda" else None
    links = given.links or ((SINGLE,) if 1 in (given.ranks, devices) else LINKS[device])
    ranks = given.ranks or (1 if SINGLE in links else devices or 2)
    _check_links(links, device, ranks)
    if SINGLE in links and given.host not in OF_HF:
        raise RecipeError(
            f"--links {SINGLE} is for --host {' or '.join(OF_HF)}, found {given.host}"
        )
    if devices is not None and ranks > devices:
        raise UnsupportedError(
            f"--ranks {ranks} needs {ranks} CUDA devices, found {devices}: ask for fewer ranks, or "
            "rehearse with --device cpu --cases tiny"
        )
    for name, value in (("--rounds", given.rounds), ("--ranks", ranks), ("--limit", given.limit)):
        if value < 1:
            raise RecipeError(f"{name} must be at least 1, found {value:g}")
    for number in given.connections or ():
        if not 1 <= number <= MOST_CONNECTIONS:
            allowed = f"from 1 to {MOST_CONNECTIONS}, which is all that CUDA takes"
            raise RecipeError(f"--connections must be {allowed}, found {number}")
    names = cases.pick(given.cases)
    dense_only = given.host != HF or SINGLE in links
    for name in names:
        if dense_only and isinstance(cases.CASES[name], cases.ExpertCase):
            raise RecipeError(
                f"case {name!r} has experts that several ranks of --host {HF} share, found --host "
                f"{given.host}, --links {' '.join(links)}"
            )
        cases.CASES[name].cut(ranks)
    strategies = tuple(given.strategies or variants.STRATEGIES)
    variants.variants(strategies, ablation=given.ablation)  # refuses what does not exist
    note = {"commit": given.commit or commit(), "command": shlex.join(["dynaflow", *typed])}
    job = Job(
        tuple(names), strategies, "", device, ranks, given.rounds, given.executor, given.ablation,
        given.cold, given.limit, str(given.out), host=given.host, note=note,
    )  # fmt: skip
    connections = dict.fromkeys(given.connections or (None,))
    places = [(link, number) for link in dict.fromkeys(links) for number in connections]
    return [dataclasses.replace(job, link=on, connections=number) for on, number in places]


def _check_links(links: Sequence[str], device: str, ranks: int) -> None:
    allowed = (*LINKS[device], SINGLE)
    for link in links:
        if link not in allowed:
            raise RecipeError(f"no link {link!r} on {device}: there are {', '.join(allowed)}")
        if (link == SINGLE) != (ranks == 1):
            raise RecipeError(
                f"--links {link} with {ranks} rank{'s' * (ranks != 1)}: one rank has no link, it "
                f"is measured alone with --links {SINGLE}; the other links take at least 2 ranks"
            )


def commit() -> str | None:
    """Of the checkout that runs, "+" behind it where files were changed; None outside of one."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "-uno") else "")
