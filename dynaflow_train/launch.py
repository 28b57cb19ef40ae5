"""Runs a training script with a recipe applied: the script itself need not know dynaflow_train.

    accelerate launch --config_file acc.yaml -m dynaflow_train.launch --recipe r.yaml train.py ...
    torchrun --nproc-per-node 2 -m dynaflow_train.launch --recipe r.yaml train.py ...
    torchrun --nproc-per-node 2 -m dynaflow_train.launch --megatron pretrain_gpt.py \
        <Megatron's flags> --dynaflow-strategy dual_batch ...

Each rank checks the recipe, exports its path in DYNAFLOW_RECIPE, lets the host's integration apply
it, and runs the script as __main__; afterwards everything is as before. With --megatron the recipe
is in Megatron's own command line.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import strategies
from .config import Recipe, environment, exported_recipe
from .errors import DynaFlowError, RecipeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; returns 2 with a message on standard error when the recipe is wrong.

    Args:
        arguments: instead of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dynaflow_train.launch", description="Runs a script with a recipe applied."
    )
    host = parser.add_mutually_exclusive_group(required=True)
    host.add_argument("--recipe", type=Path, help="path of a recipe file")
    host.add_argument(
        "--megatron",
        action="store_true",
        help="the script is Megatron's; --help after it lists its --dynaflow flags",
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="the script's own arguments")
    given = parser.parse_args(arguments)
    exported: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        if given.megatron:
            undo = apply_to_megatron()
        else:
            undo, exported = apply(read(given.recipe)), exported_recipe(given.recipe)
    except DynaFlowError as error:
        return refuse(error)
    try:
        with exported:
            run(given.script, given.rest)
    except (RecipeError, UnsupportedError) as error:
        if not given.megatron:
            raise
        return refuse(error)
    finally:
        undo()
    return 0


def refuse(error: DynaFlowError) -> int:
    """Says on standard error why nothing runs; the exit status for that."""
    print(f"[rank {environment().rank or 0}] dynaflow launch: {error}", file=sys.stderr)  # noqa: T201
    return 2


def read(path: Path) -> Recipe:
    """The recipe at `path`, its strategy and parameters checked too.

    Raises:
        RecipeError: anything in it is wrong.
    """
    return strategies.load(path)[0]


def apply(recipe: Recipe) -> Callable[[], None]:
    """Lets the recipe's host apply it to the models it builds; the result takes that back.

    Raises:
        RecipeError: the recipe names no host.
        UnsupportedError: the host is not installed, or of a version that is refused.
    """
    if recipe.host is None:
        raise RecipeError(
            "the launcher needs a recipe with a host ('host: hf'): it has to know whose models to "
            "reach. A script that calls df.compile itself needs no launcher."
        )
    if recipe.host == "megatron":
        raise RecipeError(
            "a recipe for Megatron goes into its own command line: -m dynaflow_train.launch "
            "--megatron pretrain_gpt.py ... --dynaflow-recipe <file>"
        )
    try:
        from .integrations.hf import launching  # noqa: PLC0415 - hosts are optional
    except ModuleNotFoundError as error:
        if error.name not in {"transformers", "accelerate"}:
            raise
        raise UnsupportedError(
            f"host 'hf' needs {error.name}, which is not installed: pip install dynaflow-train[hf]"
        ) from error
    return launching.apply(recipe)


def apply_to_megatron() -> Callable[[], None]:
    """Gives Megatron's parser the --dynaflow flags; the result takes them away.

    Raises:
        UnsupportedError: megatron-core is not installed, or of a version that is refused.
    """
    try:
        from .integrations.megatron import launching  # noqa: PLC0415 - hosts are optional
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"megatron", "triton"}:
            raise
        raise UnsupportedError(
            f"--megatron needs {error.name}, which is not installed: see docs/megatron.md"
        ) from error
    return launching.apply()


def run(script: str, arguments: Sequence[str]) -> None:
    """Runs a file as __main__, with `sys.argv` and `sys.path` as Python itself would set them.

    Raises:
        FileNotFoundError: no such script.
    """
    before, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
        sys.path[:] = path


if __name__ == "__main__":
    sys.exit(main())
