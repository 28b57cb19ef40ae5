"""Cuts one aten graph into the ops of a `Region`.

In:  a graph whose nodes bear labels (capture) and verdicts (split); operator rules; for a backward,
     which outputs are gradients of parameters.
Out: `Region`: every collective an op of its own, wgrad apart, merged and shared work apart, a value
     for whatever crosses ops. The graph is read, not changed; op graphs are copies.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from dynaflow_train.annotate import Rule, SplitFunc, label_key
from dynaflow_train.errors import RuleError
from dynaflow_train.ir import Op, Phase, Region, Value
from dynaflow_train.partition.collectives import group_of, kind_of
from dynaflow_train.partition.extract import extract
from dynaflow_train.partition.group import group
from dynaflow_train.partition.wgrad import above, wgrad_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

Label = tuple[str, str | None]  # mode and rule; "collective" and its name


@dataclass(frozen=True)
class Verdicts:
    """What the split stage found, in the terms of the IR.

    Attributes:
        value: node -> its Value.
        mode: node -> "split", "merged" or "shared".
        reason: why a node is merged.
        is_view: whether a node only looks at its input.
        cost: node -> (floating-point operations, bytes moved).
        packet: operator name of a node.
        module: innermost module a node stems from.
        modules: label for nodes without a rule: names of all modules around it, outermost first.
    """

    value: Callable[[fx.Node], Value]
    mode: Mapping[fx.Node, str]
    reason: Mapping[fx.Node, str]
    is_view: Callable[[fx.Node], bool]
    cost: Callable[[fx.Node], tuple[int, int]]
    packet: Callable[[fx.Node], str]
    modules: Callable[[fx.Node], Sequence[str]]


@dataclass
class _Cutter:
    graph: fx.Graph
    phase: Phase
    rules: Sequence[Rule]
    verdicts: Verdicts
    outputs: set[object] = field(default_factory=set)
    wgrads: dict[fx.Node, fx.Node] = field(default_factory=dict)
    labels: dict[fx.Node, Label] = field(default_factory=dict)
    ragged: Collection[fx.Node] = ()

    def is_floating(self, node: fx.Node) -> bool:
        """Views of shared values and constants: copied into every op that reads them."""
        if node.op == "get_attr":
            return True
        if node in self.outputs:
            return False
        if self.verdicts.mode.get(node) != "shared" or self.verdicts.packet(node) == "getitem":
            return False
        if self.verdicts.is_view(node):
            return all(self.is_floating(a) or a.op == "placeholder" for a in node.all_input_nodes)
        value = node.meta.get("val")
        return self.verdicts.packet(node) in ("full", "scalar_tensor") and (
            isinstance(value, torch.Tensor) and value.dim() == 0 and not node.all_input_nodes
        )

    def rule_label(self, node: fx.Node) -> str | None:
        """The stamp of capture."""
        return (node.meta.get("custom") or {}).get(label_key(self.rules))

    def label(self, node: fx.Node) -> Label:
        if node in self.labels:
            return self.labels[node]
        if node.target is operator.getitem:
            key = self.label(node.all_input_nodes[0])
        elif kind_of(node):
            key = ("collective", node.name)
        else:
            mode = self.verdicts.mode.get(node, "shared")
            if node in self.wgrads:
                where = self.verdicts.modules(self.wgrads[node])
                rule = f"{where[-1] if where else 'rest'}.wgrad"
            else:
                rule = self.rule_label(node) or self._inherited(node)
                mode = "sums" if mode == "split" and self._is_statistic(node) else mode
            if node in self.ragged:
                mode = "rows" if mode == "split" else f"{mode}.rows"
            key = (mode, rule)
        self.labels[node] = key
        return key

    def _is_statistic(self, node: fx.Node) -> bool:
        """Made of sums over the batch alone, and no gradient: no sample must wait for it."""
        tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        kinds = {self.verdicts.value(a).sharing for a in (node, *tensors)}
        if not "partial" in kinds <= {"partial", "shared"}:
            return False
        merged = (
            self.verdicts.mode.get(u) == "merged" or self._is_statistic(u) for u in node.users
        )
        return self.phase == "forward" or any(merged)

    def _inherited(self, node: fx.Node) -> str | None:
        """Sums of gradients bear no label of their own; nor do nodes outside every rule."""
        if (node.meta.get("custom") or {}) or self.phase != "backward":
            return None
        if self.verdicts.packet(node) != "add" or self.verdicts.modules(node):
            return None
        inputs = {self.label(a)[1] for a in node.all_input_nodes if a.op == "call_function"}
        return inputs.pop() if len(inputs) == 1 else None

    def nodes(self) -> list[fx.Node]:
        return [
            n
            for n in self.graph.nodes
            if n.op == "call_function" and n in self.verdicts.mode and not self.is_floating(n)
        ]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Call nodes that a node reads, through floating ones."""
        found: list[fx.Node] = []
        for arg in node.all_input_nodes:
            if arg.op == "call_function" and arg in self.verdicts.mode:
                found.extend(self.sources(arg) if self.is_floating(arg) else [arg])
        return found


def cut(  # noqa: PLR0913 - a graph, and what each stage before says of it
    graph: fx.Graph,
    phase: Phase,
    name: str,
    rules: Sequence[Rule],
    verdicts: Verdicts,
    *,
    split_wgrad: bool = True,
    parameter_outputs: Sequence[bool] = (),
    outputs: Sequence[object] = (),
    ragged: Collection[fx.Node] = (),
) -> Region:
    """Cut `graph` into a Region.

    Args:
        graph: aten graph without `wait_tensor` nodes.
        phase: which graph it is.
        name: the region's name.
        rules: the strategy's rules; labels of modules and functions stand on the nodes already.
        verdicts: the split stage's findings.
        split_wgrad: whether gradients of parameters become ops of their own (backward only).
        parameter_outputs: for each backward output whether it is a parameter's gradient.
        outputs: what leaves the region; what only other outputs of the graph need is left out.
        ragged: what `ragged_nodes` found.

    Raises:
        RuleError: a rule about an operator matches nothing (forward only).
    """
    cutter = _Cutter(graph, phase, rules, verdicts, ragged=ragged)
    needed = above(outputs)
    cutter.outputs.update(outputs)
    if phase == "backward" and split_wgrad:
        pairs = zip(outputs, parameter_outputs, strict=True)
        flowing = [output for output, is_parameter in pairs if not is_parameter]
        flowing += [n for n in graph.nodes if kind_of(n)]
        packets = {n: verdicts.packet(n) for n in graph.nodes if n.op == "call_function"}
        cutter.wgrads = wgrad_nodes(graph, flowing, packets)
    nodes = [n for n in cutter.nodes() if n in needed]  # dead nodes must not look like work
    groups = group(nodes, cutter.label, cutter.sources)
    _check_operator_rules(cutter, rules, phase, verdicts)
    names = _names(groups, cutter)
    ops = [
        _op(members, op_name, cutter, set(outputs))
        for members, op_name in zip(groups, names, strict=True)
    ]
    given = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = [n.name for n in given if not isinstance(n.meta.get("val"), torch.SymInt)]
    values = {n.name: verdicts.value(n) for n in (*given, *verdicts.mode)}
    return Region(
        name,
        phase,
        tuple(ops),
        values,
        tuple(inputs),
        tuple(o.name if isinstance(o, fx.Node) else None for o in outputs),
        can_split=any(v.sharing == "batch" and v.axis for v in values.values()),
    )


def _check_operator_rules(
    cutter: _Cutter, rules: Sequence[Rule], phase: Phase, verdicts: Verdicts
) -> None:
    packets = {verdicts.packet(n) for n in cutter.nodes()}
    kinds = {kind_of(n) for n in cutter.nodes()} - {None}
    targets = {n.target for n in cutter.nodes()}
    targets |= {getattr(target, "overloadpacket", None) for target in targets}
    for rule in rules:
        if phase != "forward" or not isinstance(rule, SplitFunc) or rule.optional:
            continue
        if rule.is_collective and rule.target not in kinds:
            raise RuleError(
                f"{rule} matches nothing: the forward has no such collective. "
                f"It has: {', '.join(sorted(map(str, kinds))) or 'none'}."
            )
        if rule.is_operator and rule.target not in targets:
            raise RuleError(
                f"{rule} matches nothing: no such operator in the forward graph. "
                f"It has: {', '.join(sorted(packets))}."
            )


def _names(groups: list[list[fx.Node]], cutter: _Cutter) -> list[str]:
    """A readable, unique name for each op."""
    taken: dict[str, int] = {}
    names = []
    for members in groups:
        where = cutter.verdicts.modules(members[-1]) or cutter.verdicts.modules(members[0])
        module = where[-1] if where else cutter.phase
        if kind := kind_of(members[0]):
            stamped = cutter.rule_label(members[0])
            base = f"{stamped or module}.{kind}"
        else:
            mode, rule = cutter.label(members[0])
            base = (rule or module) if mode == "split" else f"{rule or module}.{mode}"
        taken[base] = taken.get(base, 0) + 1
        names.append(base if taken[base] == 1 else f"{base}.{taken[base]}")
    return names


def _op(members: list[fx.Node], name: str, cutter: _Cutter, outputs: set[object]) -> Op:
    verdicts, collective = cutter.verdicts, kind_of(members[0])
    graph, inputs, results = extract(members, outputs, cutter.is_floating)
    flops, moved = (sum(c) for c in zip(*(verdicts.cost(n) for n in members), strict=True))
    merged = verdicts.mode[members[0]] != "split"
    paths = [path for n in members for path in reversed(verdicts.modules(n))]
    layers = [int(number) for path in paths for number in re.findall(r"(?<![^.])\d+(?![^.])", path)]
    return Op(
        name=name,
        kind="communication" if collective else "compute" if flops else "memory",
        inputs=tuple(n.name for n in inputs),
        outputs=tuple(n.name for n in results),
        merged=merged,
        is_wgrad=members[0] in cutter.wgrads,
        layer=next(iter(layers), None),
        collective=collective,
        group=group_of(members[0]) if collective else None,
        flops=flops,
        bytes=moved,
        reason=next((verdicts.reason[n] for n in members if n in verdicts.reason), None),
        ragged=members[0] in cutter.ragged,
        graph=graph,
    )
