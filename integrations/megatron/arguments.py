"""The --dynaflow flags: Megatron's parser shows them, its printout too; here they become a recipe.

Host names read here (megatron-core 0.19.2, `training/arguments.py`) are those of Megatron's flags.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import megatron.core.tensor_parallel.layers as host_layers

from dynaflow_train import strategies
from dynaflow_train.config import Recipe
from dynaflow_train.errors import RecipeError, UnsupportedError

from .compiling import BATCH_DIM
from .versions import check_config, check_recomputation

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with our flags in a group of their own."""
    group = parser.add_argument_group(title="dynaflow")
    group.add_argument(
        "--dynaflow-strategy",
        default=None,
        metavar="NAME",
        help=f"Schedule each transformer layer's operators, forward and backward, by this "
        f"strategy: {', '.join(strategies.names())}. Without it (and without a recipe) Megatron "
        f"runs as it is.",
    )
    group.add_argument(
        "--dynaflow-micro-batches",
        type=int,
        default=None,
        metavar="N",
        help="Parts that each of Megatron's micro-batches is cut into, so that one's communication "
        "runs beside the others' compute (strategies that cut).",
    )
    group.add_argument(
        "--dynaflow-region",
        choices=("model", "layer"),
        default=None,
        help="What is scheduled as a whole: the stage's stack of layers (overlap across layers, "
        "the default), or each layer alone (keeps --overlap-grad-reduce overlapping).",
    )
    group.add_argument(
        "--dynaflow-recipe",
        default=None,
        metavar="FILE",
        help="A recipe file in place of the three flags above.",
    )
    group.add_argument(
        "--dynaflow-verify",
        action="store_true",
        help="Compare the first training step with the plain one and log the worst errors.",
    )
    _mend_help(parser)
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Megatron 0.19.2 writes a bare % in a help text, and --help fails of it."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def recipe_of(args: Any) -> Recipe | None:
    """The recipe that the parsed flags ask for; None where they ask for nothing.

    Raises:
        RecipeError: flags that exclude each other, an unknown strategy, or a flag that the strategy
            has no use for.
    """
    flags = {
        name: getattr(args, f"dynaflow_{name}", None)
        for name in ("strategy", "micro_batches", "region")
    }
    given = [_flag(name) for name, value in flags.items() if value is not None]
    path, verify = getattr(args, "dynaflow_recipe", None), getattr(args, "dynaflow_verify", False)
    if path is not None:
        if given:
            raise RecipeError(f"--dynaflow-recipe excludes {', '.join(given)}: change the recipe")
        recipe, _ = strategies.load(path)
        return dataclasses.replace(recipe, verify=recipe.verify or verify)
    if flags["strategy"] is None:
        if given or verify:
            alone = ", ".join([*given, *(["--dynaflow-verify"] if verify else [])])
            raise RecipeError(f"{alone} without --dynaflow-strategy or --dynaflow-recipe")
        return None
    options = {k: v for k, v in flags.items() if v is not None}
    name = options["strategy"]
    known = {field.name for field in dataclasses.fields(strategies.get(name))}
    if "micro_batches" in options and "micro_batches" not in known:
        raise RecipeError(f"--dynaflow-micro-batches: strategy {name!r} does not cut the batch")
    most = max(options.get("micro_batches", 1), 4)
    more = {"batch_dim": BATCH_DIM, "host": "megatron", "verify": verify, "max_micro_batches": most}
    recipe = Recipe.from_options({**options, **more})
    strategies.get(recipe.strategy, **recipe.parameters)
    return recipe


def check(args: Any, recipe: Recipe) -> None:
    """Refuse flags of Megatron's that a captured layer cannot honour, before anything is built.

    Raises:
        UnsupportedError: names the flags and why.
    """
    check_config(args)
    if args.transformer_impl != "local":
        raise UnsupportedError(
            f"--transformer-impl {args.transformer_impl}: TransformerEngine's kernels and "
            "communication cannot be traced; pass --transformer-impl local"
        )
    parts = recipe.parameters.get("micro_batches", 1)
    if parts > args.micro_batch_size:
        raise RecipeError(
            f"--dynaflow-micro-batches {parts}: --micro-batch-size {args.micro_batch_size} holds "
            f"fewer samples; raise it to {parts} at least"
        )
    check_recomputation(args, recipe.region)
    if args.reset_attention_mask:
        raise UnsupportedError(
            "--reset-attention-mask gives each sample a mask of its own, [b, 1, s, s], whose batch "
            "lies elsewhere than the activations'; leave it out"
        )
    if args.gradient_accumulation_fusion and not host_layers._grad_accum_fusion_available:
        args.gradient_accumulation_fusion = False  # Apex's, which embeddings then do without
    # The causal mask, alike for every sample: the attention makes it itself.
    args.create_attention_mask_in_dataloader = False


def _flag(name: str) -> str:
    return f"--dynaflow-{name.replace('_', '-')}"
