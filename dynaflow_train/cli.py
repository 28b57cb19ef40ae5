"""The command `dynaflow`: what there is, what a recipe would run, what this machine can do.

Exit codes: 0 fine, 1 this machine cannot run dynaflow_train, or a case of a benchmark failed, 2 the
input is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from . import doctor, strategies
from .benchmarks import command as bench
from .errors import DynaFlowError, ScheduleError
from .ir import Phase
from .schedule import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .ir import Plan
    from .strategy import Strategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code.

    Args:
        arguments: instead of the command line.
    """
    parser = argparse.ArgumentParser(prog="dynaflow", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("strategies", help="list the strategies and their parameters")
    check = commands.add_parser("check", help="read a recipe and say what it would run")
    check.add_argument("recipe", type=Path)
    commands.add_parser("doctor", help="versions, GPUs, links; what will not work here and why")
    plan = commands.add_parser("plan", help="read a plan's text, check its form and print it")
    plan.add_argument("file", type=Path)
    bench.add_arguments(
        commands.add_parser("bench", help="time whole steps of strategies and baselines in turn")
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "bench":
            typed = sys.argv[1:] if arguments is None else arguments
            return bench.run(given, typed, functools.partial(print, flush=True))
        if given.command == "strategies":
            print(list_strategies())
        elif given.command == "check":
            print(describe_recipe(given.recipe))
        elif given.command == "plan":
            print(describe_plan(given.file))
        else:
            machine = doctor.examine()
            print(doctor.report(machine))
            return int(any(each.severity == "broken" for each in doctor.problems(machine)))
    except DynaFlowError as error:
        print(f"dynaflow {given.command}: {error}", file=sys.stderr)
        return 2
    return 0


def list_strategies() -> str:
    """Each strategy with the first line of its docstring and its parameters' defaults."""
    lines: list[str] = []
    for name in strategies.names():
        strategy = type(strategies.get(name))
        lines.append(f"{name:<14} {_first_line(strategy)}")
        lines += [f"{'':<14}   {key} = {value!r}" for key, value in _parameters(strategy).items()]
    return "\n".join(lines)


def describe_recipe(path: Path) -> str:
    """What the recipe would run.

    Raises:
        RecipeError: the recipe, its strategy or a parameter of it is wrong.
    """
    recipe, strategy = strategies.load(path)
    chosen = {key: getattr(strategy, key) for key in _parameters(type(strategy))}
    settings = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    other = {
        key: value
        for key, value in recipe.to_dict().items()
        if key not in {"strategy", "parameters", "description"}
    }
    lines = [recipe.description] if recipe.description else []
    lines.append(f"strategy  {recipe.strategy}({settings}): {_first_line(type(strategy))}")
    lines += [f"cuts at   {rule}" for rule in strategy.rules]
    lines.append("cuts at   every collective")
    lines += [f"{key:<17} {value}" for key, value in other.items()]
    return "\n".join(lines)


def describe_plan(path: Path) -> str:
    """The plan, then how many launches each stream has.

    Raises:
        ScheduleError: the text is no plan, or names a micro-batch or a wait that cannot be.
    """
    try:
        plan = text.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read: {error.strerror}") from error
    _check_form(plan)
    counts = Counter(launch.stream for launch in plan.launches)
    parts = [f"{stream} {counts[stream]}" for stream in plan.streams]
    waits = sum(len(launch.waits) for launch in plan.launches)
    total = f"{len(plan.launches)} launches ({', '.join(parts)}), {waits} waits between streams"
    return f"{text.dumps(plan)}\n{total}"


def _check_form(plan: Plan) -> None:
    """Refuses what is wrong in any region; only the schedule stage knows a region's ops."""
    if plan.phase not in get_args(Phase):
        raise ScheduleError(f"phase must be one of {get_args(Phase)}, found {plan.phase!r}")
    for position, launch in enumerate(plan.launches):
        for index in launch.micro_batches:
            if index >= len(plan.sizes):
                why = f"micro-batch {index} of {len(plan.sizes)}"
                shown = text.show(plan.launches, position, why)
                raise ScheduleError(f"launch {position} names {why}, counted from 0\n{shown}")
        for wait in launch.waits:
            if wait >= position:
                why = f"waits for launch {wait}, which is not issued before it"
                shown = text.show(plan.launches, position, "here")
                raise ScheduleError(f"launch {position} {why}\n{shown}")


def _parameters(strategy: type[Strategy]) -> dict[str, object]:
    if not dataclasses.is_dataclass(strategy):
        return {}
    return {each.name: each.default for each in dataclasses.fields(strategy)}


def _first_line(strategy: type[Strategy]) -> str:
    return (strategy.__doc__ or "").strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
