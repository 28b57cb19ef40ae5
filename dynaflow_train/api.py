"""The calls a user makes: compile in place, undo, look at plans, explain, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train import strategies
from dynaflow_train.backend import compile_graph, sessions_of
from dynaflow_train.config import Recipe
from dynaflow_train.dispatch import Dispatcher, install, install_stack
from dynaflow_train.errors import CaptureError, RecipeError
from dynaflow_train.report import Explanation
from dynaflow_train.report import explain as explain_one
from dynaflow_train.schedule.plot import Panel, perfetto, timeline
from dynaflow_train.schedule.text import dumps
from dynaflow_train.session import Session
from dynaflow_train.strategy import Strategy

if TYPE_CHECKING:
    from torch import fx

    from dynaflow_train.choices import Choice
    from dynaflow_train.ir import Interval, Plan, Region

What = str | Path | Recipe | Strategy


def compile(model: torch.nn.Module, what: What, **options: Any) -> torch.nn.Module:
    """Compile the model's regions in place and return the model.

    Args:
        model: any module that holds its layers in a ModuleList; without one it is a region itself.
            Region "model" is all layers in one capture (or groups of `layers_per_region`), "layer"
            each for itself; what stands around them (embedding, masks, loss) stays the host's.
        what: the name of a strategy, a Strategy, a Recipe, or the path of one.
        **options: other keys of a recipe, and parameters of the strategy, where `what` is a name.

    Raises:
        RecipeError: unknown strategy, key or parameter; the nearest valid name is given.
        CaptureError: the model is compiled already, or is none.
    """
    recipe, strategy = resolve(what, options)
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CaptureError(f"df.compile takes a torch.nn.Module, found {type(model).__name__}.")
    if next(_dispatchers(model), None) is not None:
        raise CaptureError("the model is compiled already: call df.undo(model) first.")
    session = Session(strategy, recipe)
    name, layers = layers_of(model)
    stack = recipe.region == "model" and bool(layers)
    # One backend object for all layers: Dynamo then lets equal layers share one graph.
    grouped = not stack or 0 < recipe.layers_per_region < len(layers)
    name = f"{name}.*" if layers and grouped else name
    backend = _Backend(session, name)
    if stack:
        install_stack(layers, session, backend)
    else:
        for module in layers or [model]:
            install(module, session, backend)
    return model


@dataclass(frozen=True, eq=False)
class _Backend:
    """What Dynamo calls for each graph; its messages show the name only."""

    session: Session
    name: str

    def __call__(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_graph(graph, example_inputs, self.session, self.name)

    def __repr__(self) -> str:
        return "dynaflow"


def resolve(what: What, options: Mapping[str, Any]) -> tuple[Recipe, Strategy]:
    """What `compile` is asked for, checked.

    Raises:
        RecipeError: see `compile`.
    """
    if isinstance(what, type):
        raise RecipeError(f"{what.__name__} is a class: give an instance, {what.__name__}().")
    if isinstance(what, Strategy):
        recipe = Recipe.from_options({**options, "strategy": what.name})
        return recipe, what
    if isinstance(what, str) and not what.endswith((".yaml", ".yml")):
        if "/" in what:
            raise RecipeError(f"no strategy {what!r}; a recipe file's name ends in .yaml or .yml.")
        recipe = Recipe.from_options({**options, "strategy": what})
    elif options:
        raise RecipeError(
            f"options {sorted(options)} were given beside a recipe; change the recipe instead."
        )
    elif isinstance(what, Recipe):
        recipe = what
    else:
        return strategies.load(what)
    return recipe, strategies.get(recipe.strategy, **recipe.parameters)


def layers_of(model: torch.nn.Module) -> tuple[str, list[torch.nn.Module]]:
    """The decoder layers: the ModuleList with most parameters whose entries are of one class."""
    found = [
        (sum(p.numel() for p in module.parameters()), name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(m) for m in module}) == 1
    ]
    _, name, layers = max(found, key=lambda entry: entry[0], default=(0, "model", []))
    return name, layers


def undo(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it was before `compile`. What torch.compile returned stays: drop that."""
    for module, dispatcher in list(_dispatchers(model)):
        module._compiled_call_impl = dispatcher.before
    return model


def _dispatchers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Dispatcher]]:
    for module in model.modules():
        if isinstance(module._compiled_call_impl, Dispatcher):
            yield module, module._compiled_call_impl


def sessions(model: torch.nn.Module) -> list[Session]:
    """The sessions that `compile` or torch.compile made for the model."""
    found = {id(d.session): d.session for _, d in _dispatchers(model)}
    return list(found.values()) or sessions_of(model)


@dataclass(frozen=True, repr=False)
class PlanInUse:
    """A plan that ran, with its region and, once it was measured, its times. Prints as its text.

    Attributes:
        copies: value -> bytes that are copied in each call on top of what the plain step copies.
        source: text of the fast path, or None for the interpreter.
        graphs: what was recorded as CUDA graphs, or why not; None where they are not asked for.
    """

    plan: Plan
    region: Region
    intervals: tuple[Interval, ...]
    copies: Mapping[str, int]
    source: str | None
    graphs: str | None = None

    def __str__(self) -> str:
        return dumps(self.plan)

    def __repr__(self) -> str:
        plan, name = self.plan, f"{self.plan.region} {self.plan.phase}"
        return f"<{name}: {plan.strategy} {list(plan.sizes)}, {len(plan.launches)} launches>"

    @property
    def panel(self) -> Panel:
        """For `schedule.plot`."""
        return Panel(self.plan, self.region, self.intervals)

    def save(self, path: str | Path) -> None:
        """Write the plan's text, which `schedule.text.loads` reads back."""
        Path(path).write_text(dumps(self.plan), encoding="utf-8")

    def draw(self, path: str | Path) -> Path:
        """Draw streams over time."""
        return timeline(self.panel, path)

    def trace(self, path: str | Path) -> Path:
        """Write a trace that opens in Perfetto."""
        return perfetto(self.panel, path)


def plans(model: torch.nn.Module) -> tuple[PlanInUse, ...]:
    """The plans in use, forward before backward, in the order in which they were captured."""
    return tuple(
        PlanInUse(
            entry.plan,
            runner.facts.region,
            entry.intervals,
            entry.program.copies,
            entry.source,
            None if entry.recordings is None else str(entry.recordings),
        )
        for session in sessions(model)
        for capture in session.captures
        for runner in capture.runners
        for entry in runner.entries.values()
    )


class Explanations(tuple[Explanation, ...]):
    """One `Explanation` for each measured plan; prints as tables.

    Attributes:
        choices: what `auto` chose in each context, and from what.
        graphs: of each plan, what was recorded as CUDA graphs, or why not.
        transfers: how collectives by the copy engine are made, or why not.
        kernels: of each fused kernel and shape, what runs, by which times, or why not.
        nccl: what became of the recipe's options for NCCL.
        compiled: whether the model is compiled at all.
    """

    choices: tuple[Choice, ...] = ()
    graphs: tuple[str, ...] = ()
    transfers: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    compiled: bool = True

    @property
    def hidden_share(self) -> float:
        """Share of all communication time that ran beside compute, 0 to 1; 1 without any."""
        total = sum(c.ms for e in self for c in e.collectives)
        hidden = sum(c.hidden_ms for e in self for c in e.collectives)
        return hidden / total if total else 1.0

    def __str__(self) -> str:
        told = (self.graphs, self.nccl, self.transfers, self.kernels)
        more = ["\n".join(lines) for lines in told if lines]
        if not self.compiled:
            return "the model is not compiled: call df.compile(model, ...) first."
        return "\n\n".join(map(str, (*self.choices, *self, *more))) or (
            "nothing was measured yet: each context is measured at its third training step."
        )

    __repr__ = __str__  # a table in a notebook, too


def explain(model: torch.nn.Module) -> Explanations:
    """What became of each collective, from the third call of each context, which is measured."""
    found = Explanations(
        explain_one(used.plan, used.region, used.intervals, tuple(used.copies.items()))
        for used in plans(model)
        if used.intervals
    )
    found.graphs = tuple(
        f"{used.region.name} {used.plan.phase}: {used.graphs}"
        for used in plans(model)
        if used.graphs
    )
    found.compiled = bool(sessions(model))
    rings = [session.rings for session in sessions(model) if session.rings is not None]
    found.transfers = tuple(line for each in rings for line in each.told())
    hosts = [session.kernel_host for session in sessions(model) if session.kernel_host is not None]
    found.kernels = tuple(line for each in hosts for line in (*each.says, *each.pool.told()))
    texts = [text for one in sessions(model) for text in (*one.groups.says, *one.unused())]
    found.nccl = tuple(dict.fromkeys(texts))
    captures = [capture for session in sessions(model) for capture in session.captures]
    found.choices = tuple(choice for capture in captures for choice in capture.choices)
    return found


@dataclass(frozen=True)
class Verification:
    """Relative errors against the uncut step: |difference| / |plain|, by Euclidean norms."""

    loss: float
    gradients: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient that differs most."""
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    def __str__(self) -> str:
        name, error = self.worst
        return (
            f"loss {self.loss:.2e}; worst of {len(self.gradients)} gradients {error:.2e} ({name})"
        )


def verify(
    model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None
) -> Verification:
    """The same step scheduled and plain; gradients, random state and buffers are put back.

    Args:
        model: compiled by `compile`, in training mode.
        batch: keyword arguments as a mapping, positional ones as a tuple, or one tensor.
        loss: output -> scalar; by default `output.loss`, or a tensor's mean square.

    Raises:
        CaptureError: the model is not compiled.
    """
    found = [dispatcher for _, dispatcher in _dispatchers(model)]
    if not found:
        raise CaptureError("the model is not compiled: call df.compile(model, ...) first.")
    kept = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    runs = []
    for enabled in (True, False):
        for dispatcher in found:
            dispatcher.enabled = enabled
        try:
            with torch.random.fork_rng(cuda):
                runs.append(_step(model, batch, loss or _loss))
        finally:
            for dispatcher in found:
                dispatcher.enabled = True
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            for name, parameter in model.named_parameters():
                parameter.grad = kept[name]
    (loss_a, grads_a), (loss_b, grads_b) = runs
    return Verification(
        _error(loss_a, loss_b), {name: _error(grads_a[name], grads_b[name]) for name in grads_b}
    )


def _step(
    model: torch.nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    value = loss(output)
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _loss(output: Any) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.float().square().mean()


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
    scale = b.double().norm()
    return float((a.double() - b.double()).norm() / (scale if scale > 0 else 1.0))
