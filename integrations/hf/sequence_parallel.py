"""Sequence parallelism for transformers' dense models: between blocks a rank holds part of it.

transformers reserves `enable_sequence_parallel` and wires nothing. Here the first layer keeps this
rank's part of the sequence, the last joins the parts; a block gathers its input and its row-parallel
output is summed and scattered (Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, 2022). Norms and residual sums work on s / size tokens; the gradients of their
weights are summed over the group inside the graph.

Tensors keep the host's order [b, s, h] in their shapes and have [s, b, h] in memory, where a part of
the sequence is one piece: collectives and products then need no copy. Outside of training mode layers
run as with the merged styles, so that generation may take any length.

Host seams: those of `tensor_parallel`, and the forwards of the first and the last decoder layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dynaflow_train.api import layers_of
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.functions import (
    CutFirst,
    GatherFirst,
    JoinFirst,
    ScatterFirst,
    sum_gradient,
)

from . import tensor_parallel as tp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel
    from transformers.distributed.tensor_parallel import TensorParallelLayer


def _turned(tensor: Tensor, of: Any, *given: Any) -> Tensor:
    """`of` on [s, b, h] in place of [b, s, h]: views, where memory is [s, b, h] already."""
    found: Tensor = of(tensor.transpose(0, 1), *given)
    return found.transpose(0, 1)


class SequenceBlock(tp.BlockInput):
    """A block that gathers its input [b, s / size, h]."""

    def enter(self, module: nn.Module, hidden: Tensor, group: tp.Group) -> Tensor:
        """To [b, s, h]."""
        if not module.training:
            return super().enter(module, hidden, group)
        return _turned(hidden, GatherFirst.apply, group.size, group.name)


class SequenceColumn(tp.Column):
    """Column-parallel on the gathered sequence."""

    def product(self, module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """In the order of memory: the product's rows then need no copy."""
        return _turned(x, plain) if module.training else plain(x)


class SequenceRow(tp.Row):
    """Row-parallel; the partial output is summed and scattered along the sequence."""

    def product(
        self, module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor, group: tp.Group
    ) -> Tensor:
        """[b, s, in / size] to [b, s / size, out]."""
        if not module.training:
            return super().product(module, plain, x, group)
        partial = plain(x.transpose(0, 1))
        whole: Any = ScatterFirst.apply(partial, group.size, group.name)
        return whole.transpose(0, 1)

    def bias(self, module: nn.Module, bias: Tensor, group: tp.Group) -> Tensor:
        """Added to the rank's own tokens: its gradient is partial."""
        return sum_gradient(bias, group.name) if module.training else bias


class SequenceNorm(tp.Shared):
    """A norm on the rank's own tokens."""

    def is_partial(self, module: nn.Module) -> bool:
        """In training it sees a part of the sequence."""
        return module.training


BLOCK, COLUMN, ROW = "dynaflow_sequence_block", "dynaflow_sequence_column", "dynaflow_sequence_row"
NORM = "dynaflow_sequence_norm"
STYLES: Mapping[str, TensorParallelLayer] = {
    BLOCK: SequenceBlock(),
    COLUMN: SequenceColumn(),
    ROW: SequenceRow(),
    NORM: SequenceNorm(),
}
_FOR = {tp.BLOCK: BLOCK, tp.COLUMN: COLUMN, tp.ROW: ROW}


def plan_for(model: PreTrainedModel) -> dict[str, str]:
    """`tensor_parallel.plan_for` with these styles, and one for each norm between blocks.

    Raises:
        UnsupportedError: as there; or a layer holds parameters outside of its blocks that are no
            norm's, and what they do to a part of the sequence is not known.
    """
    plan = {name: _FOR.get(style, style) for name, style in tp.plan_for(model).items()}
    name, layers = layers_of(model)
    for inner, module in layers[0].named_modules():
        key = f"{name}.*.{inner}" if inner else f"{name}.*"
        parents = {key[:place] for place, letter in enumerate(key) if letter == "."}
        if key in plan or parents & plan.keys() or not list(module.parameters(recurse=False)):
            continue
        if not type(module).__name__.endswith("Norm"):
            raise UnsupportedError(
                f"sequence parallel: {type(model).__name__} has parameters in {key!r} "
                f"({type(module).__name__}), outside of the blocks that its plan shards and no "
                "norm; take tensor_parallel: merged"
            )
        plan[key] = NORM
    return plan


def cut_stream(model: PreTrainedModel) -> None:
    """Let the first layer cut what comes in along the sequence, and the last join it, in place."""
    name, layers = layers_of(model)
    mesh: Any = model._device_mesh
    group = tp.group_of(mesh)
    first, last = layers[0], layers[-1]
    of_first, of_last = first.forward, last.forward

    def begin(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.training:
            hidden_states = _turned(
                hidden_states, CutFirst.apply, group.size, group.rank, group.name
            )
        return of_first(hidden_states, *args, **kwargs)

    first.forward = begin
    of_last = last.forward  # of a single layer, what cuts

    def end(*args: Any, **kwargs: Any) -> Any:
        out = of_last(*args, **kwargs)
        if last.training:
            out = _turned(out, JoinFirst.apply, group.size, group.rank, group.name).contiguous()
        return out

    last.forward = end

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("inputs_embeds")
        given = kwargs.get("input_ids", args[0] if args else None) if given is None else given
        if module.training and isinstance(given, Tensor) and given.shape[1] % group.size:
            raise UnsupportedError(
                f"sequence parallel over {group.size} ranks needs a sequence length divisible by "
                f"{group.size}, found {given.shape[1]}: pad to a multiple (pad_to_multiple_of), or "
                "take tensor_parallel: merged"
            )

    owner = model.get_submodule(name.rpartition(".")[0])
    owner.register_forward_pre_hook(check, with_kwargs=True)
