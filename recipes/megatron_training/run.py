"""The same training by Megatron alone and with our flags: losses side by side, tokens a second.

    python -m recipes.megatron_training.run --out folder                  # 200 steps, two GPUs
    python -m recipes.megatron_training.run --out folder --links no-p2p --sequence-parallel

Runs one after another, each in processes of its own, in the order ours, Megatron's, ours: the two
tell what a difference is worth. Writes a log for each, `losses.csv` and `report.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("pretrain.py")
FLAGS = """--transformer-impl local --tokenizer-type NullTokenizer --no-masked-softmax-fusion
--no-persist-layer-norm --no-rope-fusion --disable-bias-linear --normalization RMSNorm --swiglu
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --bf16
--untie-embeddings-and-output-weights --lr 1e-4 --lr-decay-style constant --seed 1
--eval-iters 0 --eval-interval 1000000 --log-interval 1 --no-one-logger
--dataloader-type single --num-workers 1 --use-distributed-optimizer"""
APEX = "--no-gradient-accumulation-fusion"  # Megatron alone needs Apex for it, we do not
SIZES = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --ffn-hidden-size 14336 --seq-length 4096 --max-position-embeddings 4096
--vocab-size 32000 --micro-batch-size 2 --global-batch-size 4"""
OURS = "--dynaflow-strategy dual_batch --dynaflow-micro-batches 2"
LINE = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)"
)
SETTLED = 20  # steps that are not timed: compiling, choosing, recording


def command(given: argparse.Namespace, ours: bool) -> list[str]:
    """One training's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
    line = [sys.executable, *([] if given.share_gpu else torchrun), "-m", "dynaflow_train.launch"]
    line += ["--megatron", str(SCRIPT), *shlex.split(FLAGS), *shlex.split(given.sizes)]
    line += [f"--tensor-model-parallel-size={given.ranks}", f"--train-iters={given.steps}"]
    line += ["--sequence-parallel"] if given.sequence_parallel else []
    line += given.flags
    return [*line, *(shlex.split(given.ours) if ours else [APEX])]


def start(line: list[str], log: Path, given: argparse.Namespace, env: dict[str, str]) -> None:
    """Runs one training to its end: by torchrun, or each rank by itself on the one GPU there is."""
    with log.open("w") as text, contextlib.ExitStack() as running:
        environments = [env]
        if given.share_gpu:  # ranks of one GPU pass for hosts: NCCL goes through sockets
            env = env | {"WORLD_SIZE": str(given.ranks), "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
            ranks = range(given.ranks)
            environments = [env | {"RANK": str(r), "NCCL_HOSTID": f"rank{r}"} for r in ranks]
        started = [
            subprocess.Popen(line, stdout=text, stderr=subprocess.STDOUT, env=each)
            for each in environments
        ]
        for process in started:
            running.callback(process.kill)
        for process in started:
            process.wait(given.limit)


def read(text: str) -> tuple[list[float], list[float]]:
    """(losses, milliseconds) of a log, step by step."""
    found = LINE.findall(text)
    return [float(loss) for _, _, loss in found], [float(ms) for _, ms, _ in found]


def judge(runs: dict[str, tuple[list[float], list[float]]], tokens: int) -> dict[str, object]:
    """Tokens a second of each, and how far ours is from Megatron's losses, relative."""
    speeds = {
        name: tokens * 1e3 / statistics.median(times[SETTLED:] or times)
        for name, (_, times) in runs.items()
    }
    losses = {name: each for name, (each, _) in runs.items()}
    pairs = list(zip(losses["ours"], losses["megatron"], strict=True))
    return {
        "tokens_per_s": speeds,
        "speedup": (speeds["ours"] + speeds["ours_again"]) / 2 / speeds["megatron"],
        "worst_loss_difference": max(abs(a - b) / b for a, b in pairs),
        "ours_against_itself": max(
            abs(a - b) / b for a, b in zip(losses["ours"], losses["ours_again"], strict=True)
        ),
        "first_and_last_loss": {name: (each[0], each[-1]) for name, each in losses.items()},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--links", choices=("nvlink", "no-p2p"), default="nvlink")
    parser.add_argument("--connections", default="1", help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--limit", type=float, default=250.0, help="seconds that one may take")
    parser.add_argument("--sizes", default=SIZES, help="Megatron's flags for them")
    parser.add_argument("--share-gpu", action="store_true", help="losses only, no speed")
    parser.add_argument("--ours", default=OURS, help=f"our flags (default: {OURS})")
    given, given.flags = parser.parse_known_args()  # what is not known here is Megatron's
    given.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": given.connections}
    environment |= {"NCCL_P2P_DISABLE": "1"} if given.links == "no-p2p" else {}
    runs: dict[str, tuple[list[float], list[float]]] = {}
    for name in ("ours", "megatron", "ours_again"):
        line, log = command(given, ours=name != "megatron"), given.out / f"{name}.log"
        print(name, shlex.join(line), flush=True)
        start(line, log, given, environment)
        runs[name] = read(log.read_text())
        if len(runs[name][0]) != given.steps:
            print(f"{name}: {len(runs[name][0])} of {given.steps} steps; see {log}")
            return 1
    with (given.out / "losses.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *runs])
        steps = zip(*(losses for losses, _ in runs.values()), strict=True)
        rows.writerows([number, *step] for number, step in enumerate(steps, 1))
    sizes = dict(re.findall(r"--(seq-length|global-batch-size) (\d+)", given.sizes))
    found = judge(runs, int(sizes["seq-length"]) * int(sizes["global-batch-size"]))
    (given.out / "report.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
