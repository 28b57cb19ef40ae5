"""The command `dynaflow`: output, messages, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynaflow_train import strategies
from dynaflow_train.cli import main
from dynaflow_train.ir import Launch, Plan
from dynaflow_train.schedule import text

ROOT = Path(__file__).resolve().parents[2]


def recipe(folder: Path, content: str) -> str:
    path = folder / "r.yaml"
    path.write_text(content)
    return str(path)


def plan(folder: Path, *launches: Launch) -> str:
    path = folder / "plan.txt"
    path.write_text(text.dumps(Plan("dual_batch", "model", "forward", (2, 2), launches)))
    return str(path)


def test_strategies_lists_every_one_with_its_parameters(capsys):
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert listed == list(strategies.names())
    dual = next(i for i, line in enumerate(lines) if line.startswith("dual_batch"))
    following = next(i for i, line in enumerate(lines) if i > dual and line[0] != " ")
    assert "micro_batches = 2" in {line.strip() for line in lines[dual + 1 : following]}


def test_check_says_what_would_run(tmp_path, capsys):
    path = recipe(
        tmp_path, "strategy: dual_batch\nparameters: {micro_batches: 3}\nregion: layer\nhost: hf\n"
    )
    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert "dual_batch(" in out
    assert "micro_batches=3" in out
    assert "*.self_attn" in out
    values = dict(line.split(None, 1) for line in out.splitlines() if " " in line)
    assert values["region"] == "layer"
    assert values["host"] == "hf"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("strategy: dual_bach\n", "no strategy 'dual_bach'. Did you mean 'dual_batch'?"),
        ("strategy: dual_batch\nregin: layer\n", "unknown key 'regin'. Did you mean 'region'?"),
        (
            "strategy: dual_batch\nparameters: {microbatches: 2}\n",
            "r.yaml: strategy 'dual_batch' has no parameter 'microbatches'. Did you mean 'micro_b",
        ),
        (
            "strategy: dual_batch\nparameters: {micro_batches: two}\n",
            "takes micro_batches as int (default 2), got 'two' (str)",
        ),
    ],
)
def test_check_refuses_with_exit_code_2(tmp_path, capsys, content, words):
    assert main(["check", recipe(tmp_path, content)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dynaflow check: ")
    assert words in captured.err


def test_plan_is_printed_and_counted(tmp_path, capsys):
    path = plan(
        tmp_path,
        Launch(("attn",), (0,)),
        Launch(("attn.all_reduce",), (0,), "comm", waits=(0,)),
        Launch(("attn",), (1,)),
    )
    assert main(["plan", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(Path(path).read_text())
    assert out.splitlines()[-1] == "3 launches (compute 2, comm 1), 1 waits between streams"


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch(("mlp",), (2,)), "launch 1 names micro-batch 2 of 2, counted from 0"),
        (Launch(("mlp",), (1,), waits=(1,)), "launch 1 waits for launch 1, which is not issued"),
    ],
)
def test_plan_that_cannot_be_is_refused_with_an_arrow(tmp_path, capsys, launch, words):
    assert main(["plan", plan(tmp_path, Launch(("attn",), (0,)), launch)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert next(line for line in err.splitlines() if "<--" in line).split()[0] == "1"


def test_file_that_is_no_plan(tmp_path, capsys):
    path = tmp_path / "plan.txt"
    path.write_text("  what is this\n")
    assert main(["plan", str(path)]) == 2
    assert "'  what is this'" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.txt")]) == 2
    assert "none.txt: cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_as_a_module_and_doctor_works_here():
    done = subprocess.run(
        [sys.executable, "-m", "dynaflow_train.cli", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert f"{'.'.join(map(str, sys.version_info[:3]))}\n" in done.stdout.splitlines(True)[0]
