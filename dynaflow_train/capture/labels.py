"""Stamps on every node of Dynamo's graph the annotation that won.

The stamp travels in `node.meta["custom"]`, which AOTAutograd copies to the aten nodes of forward
and backward, also through autograd.Function bodies (facts: torch 2.11 and 2.13).
"""

from __future__ import annotations

import difflib
import re
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import fx

from dynaflow_train.annotate import MARK, Rule, SplitFunc, SplitModule, label_key
from dynaflow_train.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ROOT = re.compile(r"^L\[['\"]\w+['\"]\]\.?")
_INDEX = re.compile(r"\._modules\['?(\w+)'?\]|\[(\d+)\]")
# Where a host put a wrapper in a module's place of `forward`, Dynamo names inner modules by it.
_WRAPPED = re.compile(
    r"\.forward(\.__closure__\.\d+\.cell_contents|\.__wrapped__|\.func)+\.__self__"
)


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """Qualified names and classes of the modules a node stems from, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(clean(path), class_) for path, class_ in stack.values()]


def clean(path: str) -> str:
    """`L['self'].layers.0.mlp` as `layers.0.mlp`."""
    path = _INDEX.sub(lambda m: f".{m.group(1) or m.group(2)}", path)
    path = _WRAPPED.sub("", path)
    return _ROOT.sub("", path).removeprefix("_orig_mod.").removeprefix("_orig_mod")


def _in_function(node: fx.Node, function: FunctionType) -> bool:
    code = function.__code__
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    return any(
        file == code.co_filename
        and name.rsplit(".", 1)[-1] == code.co_name
        and code.co_firstlineno <= int(line) <= last
        for file, line, name in frames
    )


class _Stamper:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.key = label_key(rules)
        self.modules = [r for r in rules if isinstance(r, SplitModule)]
        self.functions = [
            r for r in rules if isinstance(r, SplitFunc) and not (r.is_operator or r.is_collective)
        ]
        self.hits: set[Rule] = set()
        self.seen: set[str] = set()

    def label(self, node: fx.Node) -> str | None:
        stack = module_stack(node)
        self.seen.update(path for path, _ in stack if path)
        owner = stack[-1][0] if stack else ""
        custom = node.meta.get("custom") or {}
        if MARK in custom:
            return f"{owner}.{custom[MARK]}".lstrip(".")
        for rule in self.functions:
            if isinstance(rule.target, FunctionType) and _in_function(node, rule.target):
                self.hits.add(rule)
                return f"{owner}.{rule.target.__name__}".lstrip(".")
        found = None
        for path, class_ in stack:  # the deepest module wins
            for rule in self.modules:
                if path and rule.matches(path, class_):
                    self.hits.add(rule)
                    found = path
                    break
        return found

    def walk(self, gm: fx.GraphModule, outer: str | None = None) -> None:
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            label = self.label(node) or outer
            if label is not None:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), self.key: label}
            for body in _bodies(gm, node):
                self.walk(body, label)


def _bodies(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Subgraphs that a higher-order operator calls (autograd.Function, checkpoint)."""
    if node.op == "call_function":
        for arg in node.all_input_nodes:
            if arg.op == "get_attr":
                body = getattr(gm, str(arg.target), None)
                if isinstance(body, fx.GraphModule):
                    yield body


def stamp_operators(joint: fx.Graph, rules: Sequence[Rule]) -> None:
    """Write rules about operators into a joint graph, on operators and on their derivatives.

    Autograd gives the nodes of a derivative the sequence number of the operator.
    """
    found: dict[int, str] = {}
    key, wanted = label_key(rules), [r.target for r in rules if isinstance(r, SplitFunc)]
    for node in joint.nodes:
        number, packet = node.meta.get("seq_nr"), getattr(node.target, "overloadpacket", None)
        label = found.get(number, "") if number is not None else ""
        if packet is not None and (packet in wanted or node.target in wanted):
            path = next((path for path, _ in reversed(module_stack(node)) if path), "")
            label = f"{path}.{packet.__name__}".lstrip(".")
            if number is not None:
                found[number] = label
        custom = node.meta.get("custom") or {}
        if label and MARK not in custom:
            node.meta["custom"] = {**custom, key: label}


def stamp(gm: fx.GraphModule, rules: Sequence[Rule]) -> None:
    """Write the winning annotation of every node into its metadata.

    Rules about operators and collectives are matched later, on the aten graph.

    Raises:
        RuleError: a rule that is not optional matches nothing; near names are listed.
    """
    stamper = _Stamper(rules)
    stamper.walk(gm)
    for rule in (*stamper.modules, *stamper.functions):
        if rule in stamper.hits or rule.optional:
            continue
        names = sorted(stamper.seen)
        wanted = str(getattr(rule.target, "__name__", rule.target))
        near = difflib.get_close_matches(wanted.strip("*."), names, n=5, cutoff=0.3)
        raise RuleError(
            f"{rule} matches nothing among {len(names)} module names of this graph. "
            f"Near: {', '.join(near or names[:8]) or 'none'}."
        )
