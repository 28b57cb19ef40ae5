"""What the scaling run measures: rows, in the order of their turns, and how long each may take."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dynaflow_train.benchmarks.cases import CASES, ExpertCase
from dynaflow_train.benchmarks.command import LINKS
from dynaflow_train.benchmarks.variants import STRATEGIES, variants
from dynaflow_train.config import nearest
from dynaflow_train.errors import RecipeError, UnsupportedError
from dynaflow_train.integrations.hf.expert_parallel import check_alone
from dynaflow_train.strategies.auto import Auto

if TYPE_CHECKING:
    from collections.abc import Sequence

DEGREES = (8, 4, 2)
DENSE = {"8b": "8b-2x4096", "70b": "70b-2x4096"}  # -> case
EXPERTS = {"qwen-moe": "qwen-moe-2x4096", "mixtral": "mixtral-2x4096"}
TINY = {"8b": "tiny-8", "70b": "tiny-8", "qwen-moe": "tiny-qwen-moe", "mixtral": "tiny-mixtral"}
SKEWED = "-skewed"
ALL = (
    *STRATEGIES,
    *("comm_overlap+copies+graph", "comm_overlap+copies=4+graph"),
    *("comm_overlap+reserve=8", "dual_batch+reserve=8"),
)
FEW = (  # what was best somewhere on two GPUs, with and without CUDA graphs
    *("comm_overlap+graph", "dual_batch+graph", "comm_overlap+copies=4+graph"),
    *("comm_overlap", "dual_batch", "dual_batch+reserve=8"),
)
WORDS = {"all": ALL, "few": FEW}
WANTED = {"tp8": 1.15, "ep8": 1.32}  # speedup over the best baseline
WANTED_E = 0.6
# Seconds, of one 8b-2x4096 run on two H200s with an empty cache: 110 of 12 variants, 13 of `auto`'s
# candidates each, and the start of the ranks. What a run really takes scales the others.
START_S, EACH_S = 40.0, {"baseline": 6.0, "ours": 12.0, "without": 4.0}


@dataclass(frozen=True)
class Row:
    """One case on a number of ranks and a link.

    Attributes:
        name: "tp8-8b", "ep4-mixtral-skewed", "tp2-dp4-8b", "tp2-ep4".
        case: of `cases.CASES`; "" where there is nothing to measure.
        ranks: all of them. copies: of the model, each on `ranks / copies`.
        link: as in `Job`; "" where there is nothing to measure.
        refused: why the toolkit does not do it, or "".
    """

    name: str
    case: str
    ranks: int
    link: str = ""
    copies: int = 1
    refused: str = ""

    @property
    def id(self) -> str:
        """Its name and link."""
        return f"{self.name}.{self.link}" if self.link else self.name

    @property
    def wanted(self) -> float | None:
        """The speedup that it is measured for, if one is named; none on the CPU."""
        counts = self.copies == 1 and self.link in LINKS["cuda"]
        return WANTED.get(self.name.split("-")[0]) if counts else None

    def seconds(self, lines: Sequence[str]) -> float:
        """How long it would take at the pace that is known."""
        case, device = CASES[self.case], torch.device("cpu" if self.link == "gloo" else "cuda")
        per_copy, total = self.ranks // self.copies, START_S
        for each in variants(lines, ranks=per_copy, experts=isinstance(case, ExpertCase)):
            if each.why_not(device, self.link) is None:
                tried = 4 if each.name.startswith(Auto.name) else 1
                total += EACH_S[each.kind] * tried
        return total


def rows(device: str) -> list[Row]:
    """All of them, the largest number of ranks first; on the CPU with tiny shapes."""
    tiny = device == "cpu"
    found: list[Row] = []
    for ranks in DEGREES:
        cases = [(f"tp{ranks}-8b", DENSE["8b"], 1), (f"ep{ranks}-qwen-moe", EXPERTS["qwen-moe"], 1)]
        cases += [(f"ep{ranks}-qwen-moe{SKEWED}", EXPERTS["qwen-moe"] + SKEWED, 1)]
        cases += [(f"ep{ranks}-mixtral", EXPERTS["mixtral"], 1)]
        cases += [(f"tp{ranks}-70b", DENSE["70b"], 1)]
        cases += [(f"ep{ranks}-mixtral{SKEWED}", EXPERTS["mixtral"] + SKEWED, 1)]
        parts = [tp for tp in DEGREES if tp < ranks]
        cases += [(f"tp{tp}-dp{ranks // tp}-8b", DENSE["8b"], ranks // tp) for tp in parts]
        for name, case, copies in cases:
            chosen = _tiny(case) if tiny else case
            found += [Row(name, chosen, ranks, link, copies) for link in LINKS[device]]
        for tp in parts:
            ep = ranks // tp
            found.append(Row(f"tp{tp}-ep{ep}", "", ranks, refused=refusal(tp, ep)))
    return found


def _tiny(case: str) -> str:
    skewed = case.endswith(SKEWED)
    model = case.removesuffix(SKEWED).removesuffix("-2x4096")
    return TINY[model] + SKEWED * skewed


def refusal(tp: int, ep: int) -> str:
    """What the toolkit says to tensor and expert parallelism together."""
    try:
        check_alone(ep, tp)
    except UnsupportedError as error:
        return str(error)
    return "the toolkit takes it, this run has no layers for it yet"


def pick(found: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Those that are meant, by name or name and link, `*` for anything, in the order of `found`.

    Raises:
        RecipeError: no such row, with the nearest that exists.
    """
    keys = [(row, (row.name, row.id)) for row in found]
    for name in names:
        if not any(fnmatch.fnmatch(key, name) for _, both in keys for key in both):
            known = dict.fromkeys(row.name for row in found)
            raise RecipeError(f"no row {name!r}. {nearest(name, list(known))}")
    return [
        row
        for row, both in keys
        if any(fnmatch.fnmatch(key, name) for name in names for key in both)
    ]
