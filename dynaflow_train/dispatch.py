"""Stands in for a module's call: compiled in training, the host's plain forward otherwise.

It sits in `_compiled_call_impl`, the place torch keeps for `Module.compile`: names, classes, hooks
and state dicts stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.external_utils import wrap_inline

from dynaflow_train.capture import correct_gradients
from dynaflow_train.errors import CaptureError, DynaFlowError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynaflow_train.session import Session

_PLACE = "_compiled_call_impl"


class Dispatcher:
    """One module's call.

    Attributes:
        session: what it is compiled in.
        enabled: False runs the plain forward.
        before_run: called outside the capture before each run of the region.
        before: what stood in its place.
        runs_itself: False if another's call has run it.
    """

    runs_itself = True

    def __init__(self, module: torch.nn.Module, session: Session) -> None:
        self.module, self.session, self.enabled = module, session, True
        self.before = module._compiled_call_impl
        self.before_run: list[Callable[[], None]] = []

    def is_plain(self) -> bool:
        """Whether this call is none of a training step."""
        return not (self.enabled and self.module.training and torch.is_grad_enabled())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compiled or plain, as the moment asks."""
        if self.is_plain():
            return self.module._call_impl(*args, **kwargs)
        for call in self.before_run:
            call()
        calls = self.session.calls
        try:
            with correct_gradients():
                output = self.run(*args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, DynaFlowError):
                raise error.inner_exception from None  # Dynamo's wrapping says nothing more
            raise
        if self.session.calls == calls and self.runs_itself:
            self._warn_plain()
        return output

    def _warn_plain(self) -> None:
        name, limit = type(self.module).__name__, torch._dynamo.config.recompile_limit
        if not self.session.captures:
            why = "torch.compile captured nothing of it. TORCH_LOGS=graph_breaks says why"
            self.session.warn(f"{name} runs plain: {why}.")
            return
        self.session.warn(
            f"{name} runs plain in some calls: torch.compile made graphs of others and gave up, "
            f"most likely after {limit} of them (torch._dynamo.config.recompile_limit). Something "
            f"that it takes for a constant differs from layer to layer or from step to step; "
            f"TORCH_LOGS=recompiles says what.",
            reason=f"{name} runs plain in some calls",
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The call of a training step."""
        raise NotImplementedError


class _Alone(Dispatcher):
    """A region of its own."""

    compiled: Callable[..., Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


class _Stack(torch.nn.Module):
    """All layers, one after another, as one region."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the last layer returns."""
        output: Any = hidden
        for layer in self.layers:
            output = layer(hidden, *args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        return output


class _First(Dispatcher):
    """The first layer's call runs the whole stack."""

    def __init__(
        self, layers: Sequence[torch.nn.Module], session: Session, backend: Callable[..., Any]
    ) -> None:
        super().__init__(layers[0], session)
        self.layers = layers
        self.given: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.output: Any = None
        self.compiled = torch.compile(
            _Stack(layers).forward, backend=backend, fullgraph=session.recipe.strict
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        name = "hidden_states"
        hidden = args[0] if args else kwargs[name]
        rest = {key: value for key, value in kwargs.items() if args or key != name}
        held = [layer.__dict__[_PLACE] for layer in self.layers]
        for layer in self.layers:  # Dynamo must see the layers themselves
            layer.__dict__[_PLACE] = None
        try:
            output = self.compiled(hidden, *args[1:], **rest)
        finally:
            for layer, dispatcher in zip(self.layers, held, strict=True):
                layer.__dict__[_PLACE] = dispatcher
        if len(self.layers) > 1:
            self.given, self.kwargs, self.output = args[1:], rest, output
        return output


class _Later(Dispatcher):
    """A layer that the stack has run already: hands on what came in."""

    runs_itself = False

    def __init__(self, module: torch.nn.Module, first: _First, *, is_last: bool) -> None:
        super().__init__(module, first.session)
        self.first, self.is_last = first, is_last

    def is_plain(self) -> bool:
        return self.first.output is None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        first, output = self.first, self.first.output
        hidden = output[0] if isinstance(output, tuple) else output
        given = args[0] if args else kwargs.get("hidden_states")
        rest = {key: value for key, value in kwargs.items() if args or key != "hidden_states"}
        own = (*args[1:], *rest.values())
        before = (*first.given, *(first.kwargs.get(key) for key in rest))
        alike = given is hidden and rest.keys() == first.kwargs.keys() and len(own) == len(before)
        alike = alike and all(a is b for a, b in zip(own, before, strict=True))
        if self.is_last or not alike:
            first.output, first.given, first.kwargs = None, (), {}
        if not alike:
            raise CaptureError(
                "region 'model' runs all layers at once, but this model gives its layers different "
                "arguments or changes the hidden states between them. Use region: layer."
            )
        return output


def install(module: torch.nn.Module, session: Session, backend: Callable[..., Any]) -> None:
    """Make a module a region."""
    dispatcher = _Alone(module, session)
    call = module._call_impl
    if type(module).__module__.startswith("torch.nn."):  # Dynamo skips frames of torch's own
        call = wrap_inline(call)
    dispatcher.compiled = torch.compile(call, backend=backend, fullgraph=session.recipe.strict)
    module._compiled_call_impl = dispatcher  # type: ignore[assignment]


def groups_of(layers: Sequence[torch.nn.Module], size: int) -> list[Sequence[torch.nn.Module]]:
    """`size` layers each, the last what is left; all in one if `size` is 0."""
    return [layers[i : i + size] for i in range(0, len(layers), size)] if size else [layers]


def install_stack(
    layers: Sequence[torch.nn.Module], session: Session, backend: Callable[..., Any]
) -> None:
    """Make a stack of layers one region, or a region of each of its groups (`groups_of`).

    Raises:
        CaptureError: a layer has forward hooks (FSDP2, recorded hidden states) or is checkpointed,
            which only works layer by layer.
    """
    for layer in layers:
        hooks = layer._forward_hooks or layer._forward_pre_hooks
        if hooks or getattr(layer, "gradient_checkpointing", False):
            raise CaptureError(
                f"region 'model' runs all layers at once, but {type(layer).__name__} has hooks or "
                f"gradient checkpointing of its own. Use region: layer."
            )
    for group in groups_of(layers, session.recipe.layers_per_region):
        first = _First(group, session, backend)
        later = [_Later(layer, first, is_last=layer is group[-1]) for layer in group[1:]]
        for layer, dispatcher in zip(group, (first, *later), strict=True):
            layer._compiled_call_impl = dispatcher  # type: ignore[assignment]
