"""Fails when a file, a function or the product outgrows its budget; prints the largest files.

Files and functions are measured by all their lines. The whole is measured by its lines of code: a
total over docstrings too would be met by leaving out what users read.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

FILE_LINES, FUNCTION_LINES = 400, 60
BUDGETS = {("dynaflow_train", "integrations"): 9_500, ("overlap_kernels",): 2_500}
PRODUCT = tuple(folder for folders in BUDGETS for folder in folders)
OTHERS = ("tests", "tools", "benchmarks", "recipes")


def python_files(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """Python files below `folders`, each once: rglob follows no symlinked folder."""
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]


def long_functions(source: str) -> list[tuple[str, int]]:
    """Name and length of every function over the budget, decorators not counted."""
    return [
        (node.name, length)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, no comment, no docstring."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def check(root: Path) -> tuple[list[str], list[str]]:
    """Ten largest files of the product and its totals, then every breach in words.

    Files and functions of tests and scripts keep the same budgets; only the total is the product's.
    """
    product = python_files(root, PRODUCT)
    texts = {path: path.read_text() for path in product + python_files(root, OTHERS)}
    lines = {path: text.count("\n") for path, text in texts.items()}
    largest = sorted(product, key=lambda path: -lines[path])[:10]
    report = [f"{lines[path]:5d} {path.relative_to(root)}" for path in largest]
    breaches: list[str] = []
    for folders, most in BUDGETS.items():
        total = sum(code_lines(texts[path]) for path in python_files(root, folders))
        report.append(f"{total:5d} lines of code in {' and '.join(folders)}, of {most}")
        if total > most:
            breaches.append(f"{' and '.join(folders)}: {total} lines of code, over {most}")
    for path, text in texts.items():
        name = path.relative_to(root)
        if lines[path] > FILE_LINES:
            breaches.append(f"{name} has {lines[path]} lines, over {FILE_LINES}")
        breaches += [
            f"{name}: {function}() has {length} lines, over {FUNCTION_LINES}"
            for function, length in long_functions(text)
        ]
    return report, breaches


if __name__ == "__main__":
    sizes, problems = check(Path(__file__).resolve().parents[1])
    print(*sizes, sep="\n")
    sys.exit("\n".join(problems) or None)
