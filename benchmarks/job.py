"""What a group of ranks is asked to do: written by the command, read by every rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

HF, HF_SP, MEGATRON, MEGATRON_SP = HOSTS = ("hf", "hf-sp", "megatron", "megatron-sp")
OF_HF = (HF, HF_SP)
SINGLE = "single"


@dataclass(frozen=True)
class Job:
    """One link and number of connections, several cases.

    Attributes:
        cases, strategies: by name, checked.
        link: "nvlink" (whatever NCCL finds), "no-p2p" (through host memory), "gloo", or "single":
            one rank, whose collectives run over a group of one and move nothing.
        connections: CUDA_DEVICE_MAX_CONNECTIONS of its ranks; None leaves what is set, or not.
        out: folder for results and logs. scratch: folder of this group, for its store and errors.
        limit_s: seconds that a case may take, and that a rank waits for the others.
        cold: compile every variant with an empty cache of its own.
        host: whose layers: transformers' ("hf"), or Megatron's; "-sp" with sequence parallelism.
        copies: how many of the model, each on `ranks / copies` ranks with tokens of its own.
        check: gradients against the unsplit run's before anything is timed.
        note: what goes into the results as it is: command, commit.
    """

    cases: tuple[str, ...]
    strategies: tuple[str, ...]
    link: str
    device: Literal["cuda", "cpu"]
    ranks: int
    rounds: int
    executor: Literal["inductor", "eager"]
    ablation: bool
    cold: bool
    limit_s: float
    out: str
    connections: int | None = None
    scratch: str = ""
    host: str = HF
    copies: int = 1
    check: bool = False
    note: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in ("cases", "strategies"):
            content[key] = tuple(content[key])
        return cls(**content)

    @property
    def place(self) -> str:
        """Names its files: the link, and the connections where they are asked for."""
        asked = self.connections is not None
        return f"{self.link}.{self.connections}-connections" if asked else self.link

    def title(self, case: str) -> str:
        """A case's name, with its host where that is not transformers."""
        return case if self.host == HF else f"{case}-{self.host}"

    def result(self, case: str) -> Path:
        """Where the result of a case goes."""
        return Path(self.out) / f"{self.title(case)}.{self.place}.json"

    def error(self, rank: int) -> Path:
        """Where a rank leaves what made it fail."""
        return Path(self.scratch) / f"error.{rank}"

    @property
    def ready(self) -> Path:
        """Exists once the ranks have found each other."""
        return Path(self.scratch) / "ready"
