"""The torch.compile backend: the only file that knows the order of the stages.

capture (Dynamo's graph -> aten graphs) -> split (verdict of every node) -> partition (Region)
-> schedule (Plan, per context) -> execute (Program, called from then on)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from dynaflow_train import strategies
from dynaflow_train.capture import (
    BatchInputs,
    Captured,
    Compilers,
    capture,
    localise,
    make_batch_symbolic,
    stamp,
)
from dynaflow_train.capture.gradients211 import install_correction, needs_correction
from dynaflow_train.capture.labels import module_stack
from dynaflow_train.config import Recipe
from dynaflow_train.execute import GraphFacts, Runner
from dynaflow_train.execute.totals import Collected, parameters_of
from dynaflow_train.execute.trials import TriedRunner
from dynaflow_train.ir import Phase, Region, Value
from dynaflow_train.partition import Verdicts, cut, drop_waits, ragged_nodes
from dynaflow_train.session import Capture, Session
from dynaflow_train.split import Analysis, Info, analyse
from dynaflow_train.split.axis import SHARED, expr, plain_by_shape
from dynaflow_train.split.cost import cost
from dynaflow_train.split.table import SIZE_OPERATORS, VIEWS, packet_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynaflow_train.strategy import Strategy

_SESSIONS = "_dynaflow_sessions"


def dynaflow(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Entry point of `torch.compile(model, backend="dynaflow", options={...})`.

    Args:
        gm: from Dynamo.
        example_inputs: from Dynamo.
        options: keys of a `Recipe`; others are parameters of the strategy (default: dual_batch).

    Raises:
        RecipeError: unknown option. RuleError: a rule matches nothing.
    """
    recipe = Recipe.from_options({"strategy": "dual_batch", **(options or {})})
    session = Session(strategies.get(recipe.strategy, **recipe.parameters), recipe)
    return compile_graph(gm, example_inputs, session, "graph")


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], session: Session, name: str
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's within a session."""
    if not torch.is_grad_enabled():
        return gm.forward  # inference: the host's plain path
    if needs_correction(gm):
        install_correction()
        raise TensorifyScalarRestartAnalysis(restart_reason="dynaflow corrects torch 2.11")
    batch = make_batch_symbolic(gm, example_inputs, session.recipe.batch_dim)
    rules = dict.fromkeys(each.rules for each in session.strategy.alternatives.values())
    for each in rules:
        stamp(gm, each)
    stages = _Stages(session, batch, Capture(name, why_not=batch.why_not))
    _register(session, example_inputs)
    session.captures.append(stages.capture)
    inputs, wrap = localise(gm, example_inputs)
    run = wrap(capture(gm, inputs, stages.compilers(), session.max_micro_batches, rules))

    def counted(*args: Any) -> Any:
        session.calls += 1
        return run(*args)

    return counted


def sessions_of(model: torch.nn.Module) -> list[Session]:
    """Sessions that compiled a graph with one of the model's parameters, in order."""
    found: dict[int, Session] = {}
    for parameter in model.parameters():
        for session in getattr(parameter, _SESSIONS, ()):
            found[id(session)] = session
    return list(found.values())


def _register(session: Session, example_inputs: list[Any]) -> None:
    """Leave the session with the model's parameters: it lives as long as they do."""
    for value in example_inputs:
        if isinstance(value, torch.nn.Parameter):
            known = vars(value).setdefault(_SESSIONS, [])
            if session not in known:
                known.append(session)
            return


@dataclass
class _Stages:
    """Runs split, partition and execute on the graphs of one capture."""

    session: Session
    batch: BatchInputs
    capture: Capture
    forward_infos: list[Info] = field(default_factory=list)
    outputs: list[tuple[Any, Info]] = field(default_factory=list)
    ragged: Mapping[fx.Node, bool] = field(default_factory=dict)  # of the graph at hand
    ragged_saved: list[bool] = field(default_factory=list)

    def compilers(self) -> Compilers:
        """What capture calls back."""
        return Compilers(self.slotted, self.forward, self.backward, _plain)

    def _symbol(self, graph: fx.Graph) -> sympy.Symbol | None:
        symbol, inputs = self.batch.symbol, [n for n in graph.nodes if n.op == "placeholder"]
        sizes = [size for n in inputs for size in getattr(n.meta.get("val"), "shape", ())]
        return symbol if any(symbol in expr(size).free_symbols for size in sizes) else None

    def analyse_forward(self, graph: fx.Graph) -> Analysis:
        """Inputs carry the batch where their shape says so, one sample after another."""
        symbol = self._symbol(graph)
        if symbol is None:
            self.capture.why_not = self.capture.why_not or (
                "the model fixes the batch size: no input kept a symbolic batch dimension"
            )
            return analyse(graph, {}, None)
        given = {
            node: plain_by_shape(node.meta["val"], symbol)
            for node in graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        return analyse(graph, given, symbol)

    def slotted(self, graph: fx.GraphModule) -> set[fx.Node]:
        """Saved values of which each micro-batch has its own."""
        drop_waits(graph.graph)
        graph.recompile()
        found = self.analyse_forward(graph.graph)
        return {n for n, mode in found.modes.items() if mode == "split"}

    def forward(self, captured: Captured) -> Callable[..., Any]:
        """What runs the forward graph."""
        slots, graph = captured.slots, captured.graph.graph
        found = self.analyse_forward(graph)
        number = slots.num_outputs
        keep = _outputs(graph)[: number + len(slots.saved)]
        nodes = [o for o in keep[:number] if isinstance(o, fx.Node)]
        self.outputs = [(o.meta.get("val"), found.infos.get(o, SHARED)) for o in nodes]
        self.ragged = ragged_nodes(graph)
        self.ragged_saved = [self.ragged.get(n, False) for n in keep[number:]]
        self.forward_infos = [found.infos.get(n, SHARED) for n in keep[number:]]
        self.capture.tokens = _tokens(graph, self.batch.symbol)
        capture, several = self.capture, len(self.session.strategy.alternatives) > 1
        capture.forwards = self._runners(captured, "forward", found, (), keep, number)
        if several and slots.ticketed:
            capture.trials = self.session.try_all(capture, _identity(captured.graph))
            return TriedRunner(capture.forwards, capture.trials)
        if several:
            self.session.warn(
                f"{capture.name}: its forward saves nothing for a backward, so auto cannot time "
                f"its candidates and runs the first."
            )
        return capture.forwards[0]

    def backward(self, captured: Captured) -> Callable[..., Any]:
        """What runs the backward graph."""
        graph = captured.graph.graph
        drop_waits(graph)
        symbol = self._symbol(graph)
        found = analyse(graph, self._backward_infos(graph, symbol), symbol)
        saved = zip(_saved_inputs(graph), self.ragged_saved, strict=False)
        self.ragged = ragged_nodes(graph, [node for node, ragged in saved if ragged])
        outputs = _outputs(graph)
        parameters = self.batch.parameters
        if len(parameters) != len(outputs):
            parameters = (False,) * len(outputs)
        capture, number = self.capture, len(outputs)
        runners = self._runners(captured, "backward", found, parameters, outputs, number)
        assert capture.forwards, "AOTAutograd compiles the forward first"
        facts, first = capture.forwards[0].facts, runners[0]
        inputs = [node.name for node in facts.placeholders]
        collected = parameters_of(outputs, parameters, inputs, captured.slots.saved)
        for runner in runners:
            runner.records = capture.forwards[0].records
            totals = tuple(outputs[index].name for index in collected)
            runner.facts = replace(runner.facts, totals=totals)
        capture.backwards = runners
        run = TriedRunner(runners, capture.trials) if capture.trials else first
        places = {index: first.saved_places[at] for index, at in collected.items()}
        return Collected(run, places, lambda: self.session.totals) if places else run

    def _runners(
        self,
        captured: Captured,
        phase: Phase,
        found: Analysis,
        parameters: Sequence[bool],
        outputs: Sequence[Any],
        num_outputs: int,
    ) -> list[Runner]:
        """One for each alternative of the strategy; those that cut alike share the region."""
        regions: dict[Any, Region] = {}
        runners: list[Runner] = []
        for candidate, strategy in enumerate(self.session.strategy.alternatives.values()):
            cuts = (strategy.rules, strategy.split_wgrad)
            if cuts not in regions:
                graph = captured.graph.graph
                regions[cuts] = self._region(strategy, graph, phase, found, parameters, outputs)
            runner = self._runner(strategy, captured, regions[cuts], found.symbol, num_outputs)
            runner.candidate = candidate
            runner.records = runners[0].records if runners else runner.records
            runners.append(runner)
        return runners

    def _backward_infos(self, graph: fx.Graph, symbol: sympy.Symbol | None) -> dict[fx.Node, Info]:
        if symbol is None:
            return {}
        inputs = _saved_inputs(graph)
        given = dict(zip(inputs, self.forward_infos, strict=False))
        for node in inputs[len(self.forward_infos) :]:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                given[node] = self._tangent(value, symbol)
        return given

    def _tangent(self, value: torch.Tensor, symbol: sympy.Symbol) -> Info:
        """A gradient lies as the output it belongs to; outputs are told by their shape."""
        shape = [expr(s) for s in value.shape]
        alike = {
            info
            for out, info in self.outputs
            if isinstance(out, torch.Tensor) and [expr(s) for s in out.shape] == shape
        }
        if len(alike) == 1 and (info := alike.pop()).axis is not None:
            return info
        return plain_by_shape(value, symbol)

    def _region(
        self,
        strategy: Strategy,
        graph: fx.Graph,
        phase: Phase,
        found: Analysis,
        parameters: Sequence[bool],
        outputs: Sequence[Any],
    ) -> Region:
        region = cut(
            graph,
            phase,
            self.capture.name,
            strategy.rules,
            _verdicts(found),
            split_wgrad=strategy.split_wgrad and len(parameters) > 0,
            parameter_outputs=parameters,
            outputs=outputs,
            ragged=self.ragged,
        )
        if not region.can_split:
            region = replace(region, why_not=self.capture.why_not or "no value carries the batch")
        return region

    def _runner(
        self,
        strategy: Strategy,
        captured: Captured,
        region: Region,
        symbol: sympy.Symbol | None,
        num_outputs: int,
    ) -> Runner:
        session, recipe, slots = self.session, self.session.recipe, captured.slots
        facts = GraphFacts(
            captured.graph.graph,
            region,
            symbol,
            num_outputs,
            slots.saved,
            slots.slotted,
            slots.count,
            slots.ticketed,
            lambda node: packet_name(node) in SIZE_OPERATORS,
        )
        parameters = self.batch.parameters
        if len(parameters) == len(facts.placeholders):  # AOTAutograd kept the inputs as they were
            places = tuple(place for place, is_one in enumerate(parameters) if is_one)
            facts = replace(facts, parameters=places)

        def make_plan(*context: Any) -> Any:
            return session.plan(strategy, self.capture, *context)

        return Runner(
            facts,
            session.compiler,
            make_plan,
            session.kernel,
            session.groups,
            fast=recipe.engine == "fast",
            dynamic=strategy.dynamic,
            max_contexts=recipe.max_contexts,
            recorder=session.recorder,
            connector=session.connector,
        )


def _plain(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    forward = graph.forward
    return lambda arguments: forward(*arguments)


def _identity(graph: fx.GraphModule) -> str:
    """What is computed, from inputs of which shapes and dtypes."""
    given = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    sizes = [f"{getattr(v, 'dtype', v)}{list(getattr(v, 'shape', ()))}" for v in given]
    return f"{graph.code}{sizes}"


def _outputs(graph: fx.Graph) -> list[Any]:
    return list(cast("Any", graph.output_node().args[0]))


def _saved_inputs(graph: fx.Graph) -> list[fx.Node]:
    """A backward's saved tensors, one for all its slots, and then its tangents."""
    return [
        n
        for n in graph.nodes
        if n.op == "placeholder"
        and not n.name.startswith("dynaflow_slot_")
        and not isinstance(n.meta.get("val"), torch.SymInt)
    ]


def _verdicts(found: Analysis) -> Verdicts:
    def value(node: fx.Node) -> Value:
        info = found.infos.get(node, SHARED)
        return Value(
            node.name, info.sharing, info.axis, getattr(node.meta.get("val"), "dtype", None)
        )

    return Verdicts(
        value=value,
        mode=found.modes,
        reason={node: f"{why}{_where(node)}" for node, why in found.reasons.items()},
        is_view=lambda node: packet_name(node) in VIEWS,
        cost=cost,
        packet=packet_name,
        modules=lambda node: [path for path, _ in module_stack(node) if path],
    )


def _where(node: fx.Node) -> str:
    """` (file.py:12)`: the line of the model's code a node stems from."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" ({lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]})" if lines else ""


def _tokens(graph: fx.Graph, symbol: sympy.Symbol | None) -> sympy.Expr:
    """Tokens in the batch, by the first input that carries it: [b, s], [b, s, h], [t, h]."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor) or symbol is None:
            continue
        if any(symbol in expr(size).free_symbols for size in value.shape):
            floating = value.is_floating_point() and value.dim() > 1
            counted = value.shape[:-1] if floating else value.shape
            return sympy.Mul(*(expr(size) for size in counted))
    return sympy.Integer(1)
