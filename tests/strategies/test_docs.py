"""The line counts in docs/strategies.md are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from dynaflow_train.strategies import BUILT_IN
from dynaflow_train.strategy import Strategy

DOCS = Path(__file__).parents[2] / "docs" / "strategies.md"


def code_lines(node: ast.stmt) -> int:
    """Lines from the first to the last of `node`, without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        doc = node.body[0]
        assert doc.end_lineno is not None
        lines -= doc.end_lineno - doc.lineno + 1
    return lines


def counts(strategy: type[Strategy]) -> tuple[int, int]:
    """Lines of rules and of schedule; what it inherits from another strategy counts as its own."""
    rules = schedule = 0
    seen: set[str] = set()
    for class_ in strategy.__mro__:
        if class_ is Strategy:
            break
        (tree,) = ast.parse(inspect.getsource(class_)).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "rules":
                rules = rules or code_lines(node)
            elif name and name not in seen:
                schedule += code_lines(node)
                seen.add(name)
    return rules, schedule


def test_the_table_tells_the_truth():
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", DOCS.read_text(), re.MULTILINE)
    found = {name: (int(rules), int(schedule)) for name, rules, schedule in table}
    assert found == {strategy.name: counts(strategy) for strategy in BUILT_IN}
