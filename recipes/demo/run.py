"""The main job: trains with the recipe, trains again without, and says what differed.

    make demo                          # or: python recipes/demo/run.py [train.py's arguments]

Two processes, on two GPUs where there are two, else on the CPU. Writes timeline.png, trace.json
(opens in ui.perfetto.dev) and plan.txt into ./demo_out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUTPUT = Path("demo_out")
PICTURES = ("timeline.png", "trace.json", "plan.txt")
LARGE = ("--batch", "64", "--length", "512")  # for GPUs, which a step of 1,024 tokens leaves idle


def gpus() -> int:
    """How many NVIDIA GPUs the driver lists; torch need not be imported for it."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ")


def launch(name: str, *command: str) -> dict[str, Any]:
    """Runs train.py under accelerate and returns its log, with the seconds it took."""
    folder = OUTPUT / name
    folder.mkdir(parents=True, exist_ok=True)
    variables = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    variables["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])
    if gpus() < 2:
        variables |= {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    config = ["--config_file", str(HERE / "accelerate.yaml")]
    start = time.perf_counter()
    subprocess.run(
        [*accelerate, *config, *command, "--output", str(folder), *sys.argv[1:]],
        env=variables,
        check=True,
    )
    steps = [each for each in json.loads((folder / "log.json").read_text()) if "loss" in each]
    return {"steps": steps, "seconds": time.perf_counter() - start}


def table(overlapped: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Losses side by side, at most twelve rows."""
    rows = [f"{'step':>6}{'loss, overlapped':>20}{'loss, plain':>16}{'difference':>14}"]
    every = max(1, len(plain) // 10)
    for ours, theirs in zip(overlapped, plain, strict=True):
        if ours["step"] == 1 or ours["step"] % every == 0:
            gap = abs(ours["loss"] - theirs["loss"])
            rows.append(
                f"{ours['step']:>6}{ours['loss']:>20.6f}{theirs['loss']:>16.6f}{gap:>14.1e}"
            )
    return "\n".join(rows)


def main() -> None:
    """Both runs, the table, the files."""
    large = gpus() >= 2
    where = "two GPUs, NCCL, bf16" if large else "two CPU processes, gloo, fp32"
    recipe = HERE / ("recipe_gpu.yaml" if large else "recipe.yaml")
    sizes = LARGE if large else ()
    print(f"1/2  training with {HERE.name}/{recipe.name} on {where}", flush=True)
    module = ("-m", "dynaflow_train.launch", "--recipe", str(recipe))
    ours = launch("overlapped", *module, str(HERE / "train.py"), *sizes)
    print("2/2  the same steps, not scheduled", flush=True)
    theirs = launch("plain", str(HERE / "plain.py"), *sizes)

    report = json.loads((OUTPUT / "overlapped" / "dynaflow" / "report.json").read_text())
    for name in PICTURES:
        shutil.copy(OUTPUT / "overlapped" / "dynaflow" / name, OUTPUT / name)
    print(f"\n{table(ours['steps'], theirs['steps'])}\n")
    facts = {
        "worst relative gradient error": f"{report['gradient_error']:.1e} ({report['worst']})",
        "communication hidden": f"{report['hidden_share']:.0%}",
        "bytes copied by splitting": f"{report['copied_bytes']:,}",
        "seconds, overlapped and plain": f"{ours['seconds']:.0f} and {theirs['seconds']:.0f}",
        "what ran beside what": f"{OUTPUT}/timeline.png, {OUTPUT}/trace.json (ui.perfetto.dev)",
        "the plan": f"{OUTPUT}/plan.txt",
    }
    for name, value in facts.items():
        print(f"{name:>32}  {value}")


if __name__ == "__main__":
    main()
