"""--dynaflow-verify: the first training step against the plain one, gradients left alone.

Gradients are asked of autograd directly: a backward would fire the hooks that data parallelism
counts (`core/distributed/distributed_data_parallel.py`, megatron-core 0.19.2).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

import dynaflow_train.api as api
from dynaflow_train.api import Verification

if TYPE_CHECKING:
    from collections.abc import Callable

_LOGGER = logging.getLogger(__name__)


def watch(model: torch.nn.Module, told: Callable[[Verification], None] | None = None) -> None:
    """Compare at the model's first call in training; log the result.

    Args:
        model: compiled; one stage of the pipeline.
        told: gets the result in place of the log.
    """

    def first(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            handle.remove()
            (told or _log)(compare(module, args, kwargs))

    handle = model.register_forward_pre_hook(first, with_kwargs=True)


def compare(model: torch.nn.Module, args: Any, kwargs: Any) -> Verification:
    """The same step scheduled and plain, with the same random state.

    The loss is the mean square of what the model gives (per-token losses on the last stage,
    activations before it). On several ranks all must call it.
    """
    dispatchers = [each for _, each in api._dispatchers(model)]
    collecting = [each.totals for each in api.sessions(model)]
    names, parameters = zip(*_trained(model), strict=True)
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    runs: list[tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]] = []
    for scheduled in (True, False):
        for dispatcher in dispatchers:
            dispatcher.enabled = scheduled
        try:
            for session in api.sessions(model):
                session.totals = None
            with torch.random.fork_rng(cuda):
                loss = model(*args, **kwargs).float().square().mean()
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                runs.append((loss.detach(), found))
        finally:
            for dispatcher in dispatchers:
                dispatcher.enabled = True
            for session, totals in zip(api.sessions(model), collecting, strict=True):
                session.totals = totals
    (loss, ours), (plain_loss, plain) = runs
    both = zip(names, ours, plain, strict=True)
    return Verification(
        api._error(loss, plain_loss),
        {n: api._error(a, b) for n, a, b in both if a is not None and b is not None},
    )


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _log(found: Verification) -> None:
    # A warning: Megatron's default level shows nothing below.
    _LOGGER.warning("dynaflow: the first step, scheduled and plain: %s", found)
