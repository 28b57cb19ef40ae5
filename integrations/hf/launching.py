"""Brings a recipe to a script that knows nothing of it: tensor parallelism and the callback.

Host seams: `transformers/trainer.py` `Trainer.__init__` (5.17 to 5.x) gets a sharded model and one
callback more; `accelerate/parallelism_config.py` `ParallelismConfig._validate_accelerator` (1.15)
refuses two CPU processes although the code behind it runs them.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from transformers import PreTrainedModel, Trainer

from dynaflow_train.errors import UnsupportedError

from . import expert_parallel, tensor_parallel
from .callback import DynaFlowCallback

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynaflow_train.config import Recipe

OLDEST_ACCELERATE = (1, 15)


def apply(recipe: Recipe, *, schedule: bool = True) -> Callable[[], None]:
    """Let every `Trainer` made from now on run `recipe`; the result takes that back.

    The size of the tensor-parallel group is accelerate's: `parallelism_config_tp_size` of its
    config file. A model that is sharded already stays as it is.

    Args:
        recipe: what the callback compiles the model with, and whose plan shards it.
        schedule: False shards the model and leaves it uncompiled: the run to compare with.

    Raises:
        UnsupportedError: transformers or accelerate is a version that has not been read.
    """
    check_versions()
    undo_styles = tensor_parallel.apply()
    plain_init, plain_validate = Trainer.__init__, ParallelismConfig._validate_accelerator
    seen: list[Trainer] = []

    @functools.wraps(plain_init)
    def init(self: Trainer, model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        plain_init(self, shard(model, recipe), args, *more, **kwargs)
        seen.append(self)
        if schedule:
            # First, so that what it adds to the logs reaches those who report them.
            self.callback_handler.callbacks.insert(0, DynaFlowCallback(recipe, write=True))

    def validate(self: ParallelismConfig, accelerator: Any) -> None:
        on_cpus = accelerator.distributed_type == DistributedType.MULTI_CPU
        if not (on_cpus and self.tp_size == self.total_size == accelerator.num_processes):
            plain_validate(self, accelerator)

    Trainer.__init__ = init
    ParallelismConfig._validate_accelerator = validate

    def undo() -> None:
        Trainer.__init__ = plain_init
        ParallelismConfig._validate_accelerator = plain_validate
        undo_styles()
        if not seen:
            warnings.warn(
                f"the script made no transformers.Trainer, so recipe {recipe.strategy!r} was not "
                "applied: call dynaflow_train.compile(model, recipe) in it",
                stacklevel=2,
            )

    return undo


def check_versions() -> None:
    """Refuse hosts whose seams we have not read.

    Raises:
        UnsupportedError: transformers below 5.17 or above 5.x, accelerate below 1.15 or above 1.x.
    """
    tensor_parallel.check_version()
    major, minor = (int(part) for part in accelerate.__version__.split(".")[:2])
    if (major, minor) < OLDEST_ACCELERATE or major > 1:
        msg = (
            f"dynaflow_train's launcher knows accelerate 1.15 up to 1.x, found "
            f"{accelerate.__version__}: pip install 'accelerate>=1.15,<2'"
        )
        raise UnsupportedError(msg)


def shard(model: Any, recipe: Recipe) -> Any:
    """The model over accelerate's tensor-parallel group or the recipe's expert-parallel, in place.

    Raises:
        UnsupportedError: it cannot be sharded so, or the host's own plan gives wrong gradients.
    """
    tp_size = ParallelismConfig().tp_size or 1  # reads what `accelerate launch` exported
    ep_size = recipe.expert_parallel
    if tp_size == ep_size == 1:
        return model
    expert_parallel.check_alone(ep_size, tp_size)
    if not isinstance(model, PreTrainedModel):
        found = type(model).__name__
        kind = "tensor" if tp_size > 1 else "expert"
        msg = (
            f"{kind} parallelism over {max(tp_size, ep_size)} ranks needs Trainer(model=...) with "
            f"a transformers model, found {found}: pass the model itself instead of `model_init`"
        )
        raise UnsupportedError(msg)
    if (getattr(model, "_tp_size", None) or 1) > 1:
        tensor_parallel.check_host_plan(model)
        return model
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # several ranks share the cores of one host
    if ep_size > 1:
        done = hasattr(model, "_ddp_params_and_buffers_to_ignore")
        return model if done else expert_parallel.parallelize(model, ep_size, recipe.sm_reserve)
    own, sequence = recipe.tensor_parallel != "host", recipe.tensor_parallel == "sequence"
    return tensor_parallel.parallelize(model, tp_size, merged=own, sequence=sequence)
