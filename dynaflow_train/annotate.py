"""Where to cut: the three annotations a strategy or a model's author may give.

`SplitModule` names modules, `SplitFunc` names operators, collectives or Python functions, `mark`
names any stretch of code. All hold in the forward and, through autograd, in the backward.

Precedence, when several fit one node: `mark`, then `SplitFunc` of an operator, then of a function,
then `SplitModule`; among marks the innermost; among modules the deepest; then the rule that stands
first. A rule about an operator covers its derivative as well.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.traceback import annotate

from dynaflow_train.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

MARK = "dynaflow_mark"  # key of a mark in a node's `custom` metadata
LABEL = "dynaflow_label"  # key under which capture stamps the rule that won: see label_key
BACKWARD = "dynaflow_backward"  # key of what must not move into the forward, though it could
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class SplitModule:
    """Cut around every module that fits.

    Args:
        target: a glob over qualified module names (`"*.self_attn"`, alternatives by `|`), a module
            class, or a predicate over names.
        optional: matching nothing is then no error.

    Raises:
        RuleError: target is none of these.
    """

    target: str | type[torch.nn.Module] | Callable[[str], bool]
    optional: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.target, str) or callable(self.target)):
            raise RuleError(
                f"SplitModule takes a name pattern, a module class or a predicate over names, "
                f"not {self.target!r} ({type(self.target).__name__})."
            )

    def matches(self, name: str, class_: object) -> bool:
        """Whether the module called `name` of class `class_` (a type or its name) fits."""
        if isinstance(self.target, str):
            return any(
                fnmatch.fnmatchcase(f".{name}", p if p.startswith("*") else f".{p}")
                for p in self.target.split("|")
            )
        if isinstance(self.target, type):
            if isinstance(class_, type):
                return issubclass(class_, self.target)
            return str(class_).rsplit(".", 1)[-1] == self.target.__name__
        return bool(self.target(name))

    def __str__(self) -> str:
        shown = getattr(self.target, "__name__", self.target)
        return f"SplitModule({shown!r})"


@dataclass(frozen=True)
class SplitFunc:
    """Cut around calls of an operator, a kind of collective, or a Python function.

    Args:
        target: a collective kind (one of `COLLECTIVES`), an `OpOverload`, an `OpOverloadPacket`, or
            a Python function whose body is traced.
        optional: matching nothing is then no error.

    Raises:
        RuleError: target is none of these.
    """

    target: str | Callable[..., Any]
    optional: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.target, str) and self.target not in COLLECTIVES:
            raise RuleError(
                f"SplitFunc({self.target!r}) is no kind of collective; there are "
                f"{', '.join(COLLECTIVES)}. Give an operator or a function otherwise."
            )
        if not (isinstance(self.target, str) or callable(self.target)):
            raise RuleError(
                f"SplitFunc takes an operator, a function or a kind of collective, "
                f"not {self.target!r}."
            )

    @property
    def is_operator(self) -> bool:
        """Whether the target is a torch operator (matched on the aten graph)."""
        return isinstance(self.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)

    @property
    def is_collective(self) -> bool:
        """Whether the target is a kind of collective."""
        return isinstance(self.target, str)

    def __str__(self) -> str:
        return f"SplitFunc({getattr(self.target, '__name__', str(self.target))!r})"


Rule = SplitModule | SplitFunc


def mark(name: str) -> AbstractContextManager[Any]:
    """Name the code in a `with` block; it becomes ops of that name in forward and backward.

    Args:
        name: constant at trace time; made unique by the qualified name of the enclosing module.
    """
    return annotate({MARK: name})


def label_key(rules: Sequence[Rule]) -> str:
    """The key of the stamps of one set of rules; a capture may serve several strategies."""
    return f"{LABEL}_{hash(tuple(rules)):x}"
