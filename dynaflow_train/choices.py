"""Which candidate each context keeps: agreed over ranks, and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.config import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


@dataclass(frozen=True)
class Choice:
    """What `auto` chose in one context, for `explain`.

    Attributes:
        region: its name. sizes: of the context, by symbol.
        names: the candidates. times: milliseconds of forward and backward together, by candidate,
            on the slowest rank; empty if the choice was remembered from an earlier run.
        chosen: the candidate that is kept.
    """

    region: str
    sizes: tuple[Any, ...]
    names: tuple[str, ...]
    times: tuple[float, ...]
    chosen: str

    def __str__(self) -> str:
        head = f"{self.region} {list(self.sizes)}: auto keeps {self.chosen}"
        if not self.times:
            return f"{head} (measured in an earlier run)"
        rows = sorted(zip(self.times, self.names, strict=True))
        return "\n".join([head, *(f"  {ms:9.3f} ms  {name}" for ms, name in rows)])


@dataclass
class Chooser:
    """Recalls and settles the choices of one captured graph.

    Args:
        region: its name.
        names: the candidates, the same on all ranks.
        identity: all that a remembered choice depends on, beside the sizes.
        exchange: text -> the texts of all ranks that have to agree, this one's among them.
        remember: whether to read and write the disk.
    """

    region: str
    names: tuple[str, ...]
    identity: tuple[str, ...]
    exchange: Callable[[str], list[str]]
    remember: bool

    def __post_init__(self) -> None:
        self.found: list[Choice] = []

    def recall(self, context: Hashable) -> int | None:
        """The choice that all ranks remember, or None. A single candidate needs no memory."""
        if len(self.names) == 1:
            return 0
        file = self._file(context)
        name = _read(file) if file is not None else ""
        heard = set(self.exchange(name if name in self.names else ""))
        if len(heard) != 1 or not (name := heard.pop()):
            return None
        self._note(context, (), name)
        return self.names.index(name)

    def settle(self, context: Hashable, times: Sequence[float]) -> tuple[int, list[float]]:
        """The candidate whose slowest rank is fastest; the first of equals. Written to disk."""
        heard = [json.loads(text) for text in self.exchange(json.dumps(list(times)))]
        slowest = [max(each) for each in zip(*heard, strict=True)]
        best = slowest.index(min(slowest))
        self._note(context, tuple(slowest), self.names[best])
        file = self._file(context)
        if file is not None:
            _write(
                file,
                {"chosen": self.names[best], "ms": dict(zip(self.names, slowest, strict=True))},
            )
        return best, slowest

    def _note(self, context: Any, times: tuple[float, ...], chosen: str) -> None:
        self.found.append(Choice(self.region, tuple(context), self.names, times, chosen))

    def _file(self, context: Hashable) -> Path | None:
        folder = environment().cache if self.remember else None
        if folder is None:
            return None
        text = repr((self.identity, self.names, context))
        return folder / f"choice-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def machine() -> tuple[str, ...]:
    """Device, link and versions: what makes a measured choice another one."""
    found = environment()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    watched = [f"{key}={value}" for key, value in sorted(found.variables.items())]
    return (device, torch.__version__, str(torch.version.cuda), *watched)


def _read(file: Path) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or half of one: measured anew
        return ""
    return str(content.get("chosen", "")) if isinstance(content, dict) else ""


def _write(file: Path, content: dict[str, Any]) -> None:
    """All at once: another rank may read or write it now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as text:
        json.dump(content, text, indent=1)
    Path(text.name).replace(file)
