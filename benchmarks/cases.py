"""What is measured: Llama-8B- and -70B-like layers, at sizes and cuts that their names say.

And layers with experts: like Mixtral 8x7B's and Qwen2-57B-A14B's, experts shared by the ranks.
"""

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


@dataclass(frozen=True)
class ExpertCase(Case):
    """Layers of attention and experts; `batch` x `tokens` tokens of its own on every rank.

    Attributes:
        ffn: width of an expert.
        experts, top: of a layer; of each token.
        skewed: a fixed bias on the router's logits, `moe.bias`, sends most rows to low experts.
        model: whose layers: "mixtral" or "qwen3_moe" of transformers.
    """

    experts: int = 0
    top: int = 0
    skewed: bool = False
    model: str = "mixtral"

    def cut(self, ranks: int) -> int:
        """The group size; attention is whole on every rank.

        Raises:
            UnsupportedError: the experts do not divide over `ranks` ranks.
        """
        if self.experts % ranks:
            raise UnsupportedError(
                f"case {self.name!r} has {self.experts} experts, which EP {ranks} does not divide: "
                "take another number of ranks"
            )
        return ranks


MODELS: dict[str, tuple[int, dict[str, int]]] = {  # name -> layers, widths
    "8b": (4, {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}),
    "70b": (2, {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}),
}
SIZES = ((2, 4096), (2, 1024), (1, 2048), (8, 512), (16, 128))  # batch, tokens
TINY = Case("tiny", hidden=64, heads=4, kv_heads=2, ffn=128, layers=2, batch=2, tokens=16)
WIDE = Case("tiny-8", hidden=64, heads=8, kv_heads=8, ffn=128, layers=1, batch=2, tokens=16)
EXPERTS: dict[str, dict[str, Any]] = {  # name -> whose layers, widths
    "mixtral": {
        "model": "mixtral", "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8,
        "top": 2,
    },
    "qwen-moe": {  # Qwen2-57B-A14B's widths, without its shared expert
        "model": "qwen3_moe", "hidden": 3584, "heads": 28, "kv_heads": 4, "ffn": 2560,
        "experts": 64, "top": 8,
    },
}  # fmt: skip
DEPTHS = ((1, "-1layer"), (2, ""))


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
    return {case.name: case for case in (*found, TINY, WIDE, *_experts())}


def _experts() -> list[ExpertCase]:
    """Of 2 x 4096 tokens a rank, 1 and 2 layers, even and skewed; and tiny ones."""
    tiny = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 32, "experts": 8, "top": 2}
    sizes: list[tuple[str, dict[str, Any]]] = [
        (f"{name}{depth}-2x4096", {**widths, "layers": layers, "batch": 2, "tokens": 4096})
        for name, widths in EXPERTS.items()
        for layers, depth in DEPTHS
    ]
    sizes += [
        (f"tiny-{name}", {**widths, **tiny, "layers": 1, "batch": 2, "tokens": 16})
        for name, widths in EXPERTS.items()
    ]
    return [
        ExpertCase(name + "-skewed" * skewed, **given, skewed=skewed)
        for name, given in sizes
        for skewed in (False, True)
    ]


CASES = _all()
_DENSE = [name for name, case in CASES.items() if not isinstance(case, ExpertCase)]
WORDS = {  # -> what it stands for
    "all": [n for n in _DENSE if not n.startswith("tiny") and not n.endswith("-tp2")],
    "moe": [n for n in CASES if n not in _DENSE and not n.startswith("tiny")],
}


def pick(names: Sequence[str]) -> list[str]:
    """The cases that are meant, each once; `*` stands for anything.

    `all` are the dense ones but `tiny`, and `-tp2`, which two ranks would measure a second time;
    `moe` are those with experts.

    Raises:
        RecipeError: no such case, with the nearest that exists.
    """
    found: list[str] = []
    for name in names:
        matching = WORDS.get(name) or fnmatch.filter(CASES, name)
        if not matching:
            raise RecipeError(f"no case {name!r}. {nearest(name, CASES)}")
        found += matching
    return list(dict.fromkeys(found))
