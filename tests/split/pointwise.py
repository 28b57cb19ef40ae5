"""Every operator that torch tags as pointwise, and those our table adds, with made-up arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynaflow_train.split import table
from tests.split.cases import batched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FLOATS = [batched(0, seed) for seed in range(3)]
INPUTS = [
    *FLOATS,
    *[(10 * x).long() for x in FLOATS],
    *[x > 0.5 for x in FLOATS],
    *[torch.polar(x, x) for x in FLOATS],
]
OTHER = {"number": 2, "int": 1, "float": 2.0, "bool": False, "str": "floor"}
GROUPS = 8


def operators(group: int) -> list[Any]:
    """Every `GROUPS`th of those that only compute a tensor."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, rest = name.split("::")
        packet, _, overload = rest.partition(".")
        if space not in ("aten", "prims") or "out" in overload or packet.startswith("special_"):
            continue
        operator = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        ours = packet if space == "aten" else f"{space}.{packet}"
        named = ours in table._POINTWISE.split() and packet != "masked_fill"  # see `cases`
        drawn = torch.Tag.nondeterministic_seeded in operator.tags
        tensors = all(str(r.type) == "Tensor" for r in operator._schema.returns)
        tagged = torch.Tag.pointwise in operator.tags
        if (tagged or named) and tensors and not drawn and not operator._schema.is_mutable:
            found.append(operator)
    return found[group::GROUPS]


def application(operator: Any) -> Callable[..., Any]:
    """`INPUTS` -> the operator of the first three that have a dtype it takes.

    Raises:
        AssertionError: there is none; the operator needs a case of its own.
    """
    kinds = [
        (a.name, str(a.type).removeprefix("Optional[").removesuffix("]"), a.kwarg_only)
        for a in operator._schema.arguments
        if not a.has_default_value() or (a.name == "min" and "cl" in operator.__name__)
    ]

    def apply(start: int, inputs: list[Tensor]) -> Any:
        given = iter(inputs[start:])
        values = [
            (n, next(given) if kind == "Tensor" else OTHER.get(kind, torch.float64), keyword)
            for n, kind, keyword in kinds
        ]
        named = {n: v for n, v, keyword in values if keyword}
        return operator(*[v for _, v, keyword in values if not keyword], **named)

    for start in range(0, len(INPUTS), 3):
        try:
            apply(start, INPUTS)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        return lambda *inputs: apply(start, list(inputs))
    message = f"{operator} takes none of our dtypes: write a case for it"
    raise AssertionError(message)


def all_of(group: int) -> Callable[..., list[Any]]:
    """One function that applies each operator of a group."""
    applied = [application(operator) for operator in operators(group)]
    return lambda *inputs: [apply(*inputs) for apply in applied]
