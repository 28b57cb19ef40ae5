"""What is measured: Llama-8B- and -70B-like layers, at sizes and cuts that their names say."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.config import nearest
from dynaflow_train.errors import RecipeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Case:
    """`layers` layers of a model, `batch` x `tokens` tokens on every rank of the TP group.

    Attributes:
        tp: size of the group whose local shapes the layers have, or None for the ranks there are.
            Collectives always run over the ranks there are.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    batch: int
    tokens: int
    tp: int | None = None

    def cut(self, ranks: int) -> int:
        """The group size whose local shapes every rank has.

        Raises:
            UnsupportedError: the layers cannot be cut so over `ranks` ranks.
        """
        cut = self.tp or ranks
        if cut % ranks:
            raise UnsupportedError(
                f"case {self.name!r} has the shapes of TP {cut}, which {ranks} ranks cannot share "
                f"evenly: take a number of ranks that divides {cut}"
            )
        for what, size in (("heads", self.heads), ("kv_heads", self.kv_heads), ("ffn", self.ffn)):
            if size % cut:
                raise UnsupportedError(
                    f"case {self.name!r} has {what} = {size}, which TP {cut} does not divide: take "
                    "fewer ranks"
                )
        return cut

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Random embeddings [b, s, h] that want a gradient."""
        shape = (self.batch, self.tokens, self.hidden)
        x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
        return {"inputs_embeds": x}


MODELS: dict[str, tuple[int, dict[str, int]]] = {  # name -> layers, widths
    "8b": (4, {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}),
    "70b": (2, {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}),
}
SIZES = ((2, 4096), (2, 1024), (1, 2048), (8, 512), (16, 128))  # batch, tokens
TINY = Case("tiny", hidden=64, heads=4, kv_heads=2, ffn=128, layers=2, batch=2, tokens=16)


def _all() -> dict[str, Case]:
    found: list[Case] = []
    cuts = ((None, ""), (2, "-tp2"), (4, "-tp4"), (8, "-tp8"))
    for tp, end in cuts:
        for model, (layers, widths) in MODELS.items():
            found += [
                Case(f"{model}-{b}x{s}{end}", **widths, layers=layers, batch=b, tokens=s, tp=tp)
                for b, s in SIZES
            ]
    found += [
        Case(f"8b-{n}layers-2x1024{end}", **MODELS["8b"][1], layers=n, batch=2, tokens=1024, tp=tp)
        for n in (2, 8, 32)
        for tp, end in cuts
    ]
    return {case.name: case for case in (*found, TINY)}


CASES = _all()
_ALL = [name for name in CASES if name != "tiny" and not name.endswith("-tp2")]


def pick(names: Sequence[str]) -> list[str]:
    """The cases that are meant, each once; `*` stands for anything.

    `all` leaves out `tiny`, and `-tp2`, which two ranks would measure a second time.

    Raises:
        RecipeError: no such case, with the nearest that exists.
    """
    found: list[str] = []
    for name in names:
        matching = _ALL if name == "all" else fnmatch.filter(CASES, name)
        if not matching:
            raise RecipeError(f"no case {name!r}. {nearest(name, CASES)}")
        found += matching
    return list(dict.fromkeys(found))
