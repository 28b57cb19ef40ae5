"""The size budgets hold, and the script that says so finds what breaks them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "check_layout.py"


@pytest.fixture
def layout():
    spec = importlib.util.spec_from_file_location("check_layout", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def house(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_repository_keeps_its_budgets():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "lines of code in dynaflow_train and integrations, of 9500" in run.stdout
    assert "lines of code in overlap_kernels, of 2500" in run.stdout


def test_exactly_at_the_budget_passes_and_one_more_line_fails(layout, tmp_path):
    at = house(tmp_path, dynaflow_train__a="x = 1\n" * 400)
    assert layout.check(at)[1] == []
    over = house(tmp_path, dynaflow_train__a="x = 1\n" * 401)
    assert layout.check(over)[1] == ["dynaflow_train/a.py has 401 lines, over 400"]


def test_long_function_is_named_with_its_length(layout, tmp_path):
    body = "    x = 1\n"
    text = "def short():\n" + body * 59 + "async def long():\n" + body * 60
    root = house(tmp_path, overlap_kernels__k=text)
    assert layout.check(root)[1] == ["overlap_kernels/k.py: long() has 61 lines, over 60"]


def test_product_total_counts_symlinked_folders_once(layout, tmp_path):
    files = {f"integrations__f{i}": "x = 1\n" * 400 for i in range(23)}
    root = house(tmp_path, dynaflow_train__a="x = 1\n" * 300, tests__t="x = 1\n" * 300, **files)
    (root / "dynaflow_train" / "integrations").symlink_to("../integrations")
    report, breaches = layout.check(root)
    assert breaches == []
    both = "dynaflow_train and integrations"
    assert report[-2] == f" 9500 lines of code in {both}, of 9500"
    house(root, dynaflow_train__b="x = 1\n", overlap_kernels__k="x = 1\n")
    assert layout.check(root)[1] == [f"{both}: 9501 lines of code, over 9500"]
    kernels = {f"overlap_kernels__k{i}": "x = 1\n" * 400 for i in range(7)}
    assert layout.check(house(root, **kernels))[1][1:] == [
        "overlap_kernels: 2801 lines of code, over 2500"
    ]


def test_only_code_counts_in_the_total(layout):
    text = (
        '"""Docs.\n\nMore.\n"""\n\n# why\nx = (  # one\n    1\n)\n\n\ndef f():\n    """Says."""\n'
    )
    assert layout.code_lines(text) == 4
    assert layout.code_lines(text + '    return """a\n\nb"""\n') == 7


def test_short_names_are_refused(tmp_path):
    for name in ("integrations", "overlap_kernels"):
        run = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert run.returncode == 1
        assert f"installs as 'dynaflow_train.{name}'" in run.stderr


def test_architecture_names_only_modules_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150
    names = set(re.findall(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|yaml|md|toml)|(?:[\w-]+/)+)`", text))
    assert len(names) > 10
    missing = [
        name
        for name in sorted(names)
        if not any((ROOT / base / name).exists() for base in (".", "dynaflow_train"))
    ]
    assert missing == []
