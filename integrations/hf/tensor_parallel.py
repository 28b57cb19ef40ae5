"""Tensor parallelism for transformers with one all-reduce per block and direction.

transformers' own plan lets every column-parallel linear sum its own input gradient: a Llama layer
then issues 2 all-reduces forward and 5 backward. Here the *block* (attention, MLP) sums its input's
gradient once: 2 forward and 2 backward, Megatron's f and g. The styles enter through the host's
registry; parameters stay its DTensors, so that its checkpoints keep working, but every forward runs
on local tensors.

Host seams (5.17 to 5.x): `transformers/distributed/tensor_parallel.py` `ALL_PARALLEL_STYLES`,
`TensorParallelLayer.{shard_param, install_forward}`; `transformers/distributed/mixin.py`
`prepare_distribute_model`, `maybe_distribute_model`.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from dynaflow_train.errors import UnsupportedError
from dynaflow_train.integrations.functions import SumOutput, sum_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from torch.distributed.device_mesh import DeviceMesh

BLOCK, COLUMN, ROW = "dynaflow_block", "dynaflow_column", "dynaflow_row"
SHARED, WHOLE = "dynaflow_shared", "dynaflow_whole"
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
OURS_FOR = {
    "colwise": COLUMN,
    "rowwise": ROW,
    PARTIAL_GRADIENT: SHARED,
    # Sharded it would save memory and cost one collective more; it has no style of ours yet.
    "embedding_rowwise": WHOLE,
}
GATHERED_HEAD = ("colwise_gather_output", "colwise_rep")


class Group(NamedTuple):
    """The ranks that share each layer."""

    name: str
    size: int
    rank: int


def group_of(mesh: DeviceMesh) -> Group:
    """The tensor-parallel one of a mesh."""
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return Group(group.group_name, group.size(), group.rank())


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextlib.contextmanager
def _swapped(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Generator[None]:
    """Let `module` use these tensors for its own parameters."""
    slots: dict[str, Any] = module._parameters
    own = {name: slots[name] for name in tensors}
    slots.update(tensors)
    try:
        yield
    finally:
        slots.update(own)


def local_parameters(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let `module` use the local tensors of its own parameters."""
    return _swapped(module, {k: _local(p) for k, p in module._parameters.items()})


class BlockInput(TensorParallelLayer):
    """A block whose column-parallel children share one input: its gradient is summed once."""

    def enter(self, module: nn.Module, hidden: Tensor, group: Group) -> Tensor:
        """Sum the gradient of the block's first argument (`hidden_states`, [b, s, h])."""
        del module
        return sum_gradient(hidden, group.name)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Let the first argument go through `enter`."""
        group, plain = group_of(mesh), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                args = (self.enter(module, args[0], group), *args[1:])
            else:
                hidden = self.enter(module, kwargs["hidden_states"], group)
                kwargs = {**kwargs, "hidden_states": hidden}
            return plain(*args, **kwargs)

        module.forward = forward
        return module


class Column(ColwiseParallel):
    """A linear that owns a slice of the output features; its input is whole, its output local."""

    def product(self, module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """[b, s, in] to [b, s, out / size]."""
        del module
        return plain(x)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Run the plain forward on the local slices of weight and bias."""
        del mesh
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            with local_parameters(module):
                return self.product(module, plain, x)

        module.forward = forward
        return module


class Row(RowwiseParallel):
    """A linear that owns a slice of the input features; its partial output is summed."""

    def product(
        self, module: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor, group: Group
    ) -> Tensor:
        """[b, s, in / size] to the sum over the group, [b, s, out]."""
        del module
        return SumOutput.apply(plain(x), group.name)  # pyright: ignore[reportReturnType]

    def bias(self, module: nn.Module, bias: Tensor, group: Group) -> Tensor:
        """What is added to it."""
        del module, group
        return bias

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Run the plain forward without the bias, sum over the group, then add the bias once."""
        group, plain = group_of(mesh), module.forward

        def forward(x: Tensor) -> Tensor:
            local = {k: _local(p) for k, p in module._parameters.items()}
            with _swapped(module, {**local, "bias": None}):
                whole = self.product(module, plain, x, group)
            bias = local.get("bias")
            return whole if bias is None else whole + self.bias(module, bias, group)

        module.forward = forward
        return module


class Shared(TensorParallelLayer):
    """A whole weight used on a rank's own heads (Qwen3's q_norm, k_norm): its gradient is partial.

    The sum is part of the graph. transformers sums the accumulated `.grad` instead, which counts
    the earlier micro-steps of gradient accumulation once per rank.
    """

    def is_partial(self, module: nn.Module) -> bool:
        """Whether its gradient is."""
        del module
        return True

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Pass each parameter of `module` through f."""
        group, plain = group_of(mesh), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_partial(module):
                return plain(*args, **kwargs)
            own = {k: p for k, p in module._parameters.items() if p is not None}
            with _swapped(module, {k: sum_gradient(p, group.name) for k, p in own.items()}):
                return plain(*args, **kwargs)

        module.forward = forward
        return module


class Whole(TensorParallelLayer):
    """Every rank holds and computes all of it."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **_host: Any) -> nn.Module:
        """Leave the module as it is."""
        del mesh
        return module


def apply(more: Mapping[str, TensorParallelLayer] | None = None) -> Callable[[], None]:
    """Register our styles, and `more`, in transformers' registry; the result takes them out again.

    Raises:
        UnsupportedError: transformers is older than 5.17 or newer than 5.x.
    """
    check_version()
    styles: dict[str, TensorParallelLayer] = {
        BLOCK: BlockInput(), COLUMN: Column(), ROW: Row(), SHARED: Shared(), WHOLE: Whole(),
        **(more or {}),
    }  # fmt: skip
    added = [name for name in styles if name not in ALL_PARALLEL_STYLES]
    for name in added:
        ALL_PARALLEL_STYLES.register(name, styles[name])  # pyright: ignore[reportArgumentType]

    def undo() -> None:
        for name in added:
            type(ALL_PARALLEL_STYLES)._global_mapping.pop(name, None)

    return undo


def check_version() -> None:
    """Refuse a transformers whose seams we have not read.

    Raises:
        UnsupportedError: transformers is older than 5.17 or newer than 5.x.
    """
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if (major, minor) < (5, 17) or major > 5:
        msg = (
            f"dynaflow_train's tensor parallelism knows transformers 5.17 up to 5.x, found "
            f"{transformers.__version__}: pip install 'transformers>=5.17,<6'"
        )
        raise UnsupportedError(msg)


def plan_for(model: PreTrainedModel | PreTrainedConfig) -> dict[str, str]:
    """The host's plan with our styles: what to pass as `DistributedConfig(tp_plan=...)`.

    Args:
        model: a causal LM, or the config of one.

    Returns:
        module name (layer numbers as `*`) -> style.

    Raises:
        UnsupportedError: the model has no plan, a style without a counterpart here, or a block with
            a parameter that the plan does not name (its gradient would be wrong).
    """
    found: PreTrainedModel
    if isinstance(model, PreTrainedModel):
        found = model
    else:
        with torch.device("meta"):
            found = AutoModelForCausalLM.from_config(model)
    host = dict(found.tp_plan or {})
    if not host:
        msg = f"{type(found).__name__} has no tensor-parallel plan: it cannot be sharded by one"
        raise UnsupportedError(msg)
    plan = {name: _our_style(found, name, style) for name, style in host.items()}
    blocks = dict.fromkeys(k.rpartition(".")[0] for k, style in plan.items() if style == COLUMN)
    for block in blocks:
        plan[block] = BLOCK
        _check_block(found, block, plan)
    return plan


def _our_style(model: PreTrainedModel, name: str, style: str) -> str:
    if style in GATHERED_HEAD:
        # A tied head is the embedding's weight, which is whole on every rank.
        tied = getattr(model.config, "tie_word_embeddings", False)
        return WHOLE if tied else style
    if style not in OURS_FOR and style not in OURS_FOR.values() and style != BLOCK:
        msg = (
            f"{type(model).__name__} shards {name!r} with style {style!r}; dynaflow_train has "
            f"counterparts for {', '.join(OURS_FOR)}. Use the host's own plan: leave `tp_plan` out"
        )
        raise UnsupportedError(msg)
    return OURS_FOR.get(style, style)


def _check_block(model: PreTrainedModel, block: str, plan: Mapping[str, str]) -> None:
    """Whatever reads the block's input must be in the plan, else f would sum a whole gradient."""
    inside = re.compile(re.escape(block).replace(r"\*", r"\d+") + r"\.(.+)")
    found = (inside.fullmatch(name) for name, _ in model.named_parameters())
    owners = {f"{block}.{m[1].rpartition('.')[0]}" for m in found if m}
    if missing := sorted(owners - plan.keys()):
        msg = (
            f"{type(model).__name__}: the plan does not name {', '.join(missing)}, so the gradient "
            f"of the input of {block!r} cannot be summed once. Use the host's own plan"
        )
        raise UnsupportedError(msg)


def parallelize(
    model: PreTrainedModel, tp_size: int, *, merged: bool = True, sequence: bool = False
) -> PreTrainedModel:
    """Shard a model over `tp_size` ranks, in place.

    The ranks must hold equal weights (built with one seed, or loaded). Starts torch.distributed
    from the launcher's environment if nobody has.

    Args:
        model: a transformers model with a tensor-parallel plan.
        tp_size: number of ranks that share each layer.
        merged: our styles; False takes the host's own plan.
        sequence: our styles, and between blocks each rank holds its part of the sequence (see
            `sequence_parallel`). Whoever compiles the model does it afterwards.

    Raises:
        UnsupportedError: heads or widths do not divide by `tp_size`, `plan_for` refuses, or the
            host's own plan was asked for and gives wrong gradients.
    """
    from . import sequence_parallel  # noqa: PLC0415 - it builds on this module

    _check_divides(model.config, tp_size)
    undo = apply(sequence_parallel.STYLES)
    try:
        if merged:
            plan = sequence_parallel.plan_for(model) if sequence else plan_for(model)
            # Set on the model, not in the config: later versions merge a config's plan into the
            # host's, and 5.24 fails on a rule for a tied head.
            model.tp_plan = {name: s for name, s in plan.items() if s != WHOLE}
        # 5.17 returns a mesh, later versions a mesh manager; both go back as they came.
        config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=tp_size))
        sharded: Any = type(model).maybe_distribute_model(model, config, mesh)
    finally:
        undo()
    check_host_plan(sharded)
    if sequence:
        sequence_parallel.cut_stream(sharded)
    return sharded


def _check_divides(config: PreTrainedConfig, tp_size: int) -> None:
    text = config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size % tp_size:
            msg = f"tensor parallel over {tp_size} ranks needs {key} divisible by it, found {size}"
            raise UnsupportedError(msg)


def check_host_plan(model: nn.Module) -> None:
    """Refuse a sharded model whose own plan gives wrong gradients.

    Raises:
        UnsupportedError: a replicated weight with partial gradients (Qwen3's q_norm, k_norm) is
            summed on the accumulated `.grad`.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    sharded = (getattr(model, "_tp_size", None) or 1) > 1
    wrong = [name for name, style in plan.items() if style == PARTIAL_GRADIENT]
    if sharded and wrong:
        msg = (
            f"{type(model).__name__} is sharded with transformers {transformers.__version__}'s own "
            f"plan, whose style {PARTIAL_GRADIENT!r} on {', '.join(wrong)} sums the accumulated "
            "gradient once per micro-step (wrong with gradient accumulation) and breaks the graph "
            "on 5.17. Shard it with dynaflow_train.integrations.hf.tensor_parallel.parallelize, or "
            "pass DistributedConfig(tp_plan=plan_for(config)) after apply()"
        )
        raise UnsupportedError(msg)


def gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; a plain tensor comes back as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, gathered; all ranks must call it."""
    return {n: gather(p.grad) for n, p in model.named_parameters() if p.grad is not None}
