"""Recipes and options; the only reader (and writer) of the environment."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import yaml

from .errors import RecipeError

RegionKind = Literal["model", "layer"]
Executor = Literal["inductor", "eager"]
Engine = Literal["fast", "interpreter"]
TensorParallel = Literal["merged", "sequence", "host"]
Host = Literal["hf", "megatron"]
Transfer = Literal["group", "copy_engine"]
Priority = Literal["normal", "high"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "region": get_args(RegionKind),
    "executor": get_args(Executor),
    "engine": get_args(Engine),
    "tensor_parallel": get_args(TensorParallel),
    "transfer": get_args(Transfer),
    "host": (*get_args(Host), None),
    "priority": get_args(Priority),
}
_LEAST = {
    "layers_per_region": 0,
    "max_micro_batches": 1,
    "max_contexts": 1,
    "batch_dim": 0,
    "transfer_chunks": 1,
    "expert_parallel": 1,
    "sm_reserve": 0,
    "max_ctas": 1,
    "min_ctas": 1,
}


@dataclass(frozen=True)
class StreamOptions:
    """What NCCL is told for the collectives of one stream; None leaves it to NCCL.

    Attributes:
        max_ctas, min_ctas: thread blocks of a collective's kernel, each of which takes an SM.
        priority: of the stream. Without it "comm" is high, others are normal.
    """

    max_ctas: int | None = None
    min_ctas: int | None = None
    priority: Priority | None = None

    def __str__(self) -> str:
        values = dataclasses.asdict(self).items()
        return ", ".join(f"{name} {value}" for name, value in values if value is not None)


@dataclass(frozen=True)
class Recipe:
    """What to run, and how: the content of a recipe file, or of `torch.compile`'s options.

    Attributes:
        strategy: name of a strategy (`dynaflow strategies` lists them).
        parameters: the strategy's own settings, by name.
        region: "model", the whole decoder stack in one capture (collectives overlap across layers),
            or "layer", each layer on its own (composes with checkpointing, FSDP2 and DDP).
        layers_per_region: with region "model", as many layers in one capture as that, 0 for all of
            them. Equal groups share a capture, and between two of them gradients reach autograd:
            compiling takes less time, data parallelism reduces while the backward runs.
        max_micro_batches: most parts that one captured batch may be cut into.
        executor: what compiles an op: "inductor", or "eager" for debugging.
        engine: "fast", or "interpreter", the reference that runs a plan launch by launch.
        batch_dim: dimension of the batch in the region's first tensor input.
        strict: raise where a plan would fall back to the uncut step with a warning.
        verify: compare the first step of each context with the uncut step.
        agree_timeout_s: seconds to wait for the other ranks' plan hashes.
        transfer: what moves the data of all-reduces, all-gathers and reduce-scatters: their process
            "group", or the "copy_engine" of GPUs on one host, which leaves the SMs to compute.
        transfer_chunks: with the copy engine, between two ranks, a matrix product to be all-reduced
            is made in as many parts of its rows, and each is exchanged while the next is computed.
        cuda_graphs: record each phase as one CUDA graph after a few steps and replay it.
        nccl: by the name of a stream, a mapping with the keys of `StreamOptions`.
        max_contexts: plans kept per region; the oldest goes.
        tensor_parallel: "merged", our plan with one reduction per block input; "sequence", the same
            with each rank's part of the sequence between blocks; or the "host"'s own.
        expert_parallel: ranks that share the experts of each layer of a transformers model, each
            with tokens of its own: 1, or the number of processes.
        sm_reserve: SMs that grouped products of experts leave to communication beside them, by a
            switch internal to torch; 0 leaves it alone.
        host: the system whose integration the launcher applies, or None.
        description: one line for people.
    """

    strategy: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    region: RegionKind = "model"
    layers_per_region: int = 0
    max_micro_batches: int = 4
    executor: Executor = "inductor"
    engine: Engine = "fast"
    batch_dim: int = 0
    strict: bool = False
    verify: bool = False
    agree_timeout_s: float = 60.0
    transfer: Transfer = "group"
    transfer_chunks: int = 1
    cuda_graphs: bool = False
    nccl: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any], hash=False)
    max_contexts: int = 16
    tensor_parallel: TensorParallel = "merged"
    expert_parallel: int = 1
    sm_reserve: int = 0
    host: Host | None = None
    description: str = ""

    def __post_init__(self) -> None:
        _check(self.to_dict(), "recipe")
        own = self.to_dict()  # the caller keeps theirs
        for name in ("parameters", "nccl"):
            object.__setattr__(self, name, own[name])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML file whose keys are the attributes above.

        Raises:
            RecipeError: no such file, no mapping, an unknown key (the nearest valid name is given)
                or a wrong value (what is allowed is given).
        """
        source = f"recipe {path}"
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RecipeError(f"{source}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{source}: is not YAML: {error}") from error
        if not isinstance(content, dict):
            found = type(content).__name__
            raise RecipeError(
                f"{source}: must hold keys and values ('strategy: dual_batch'), found {found}"
            )
        return cls._build(cast("dict[Any, Any]", content), source)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Reads `torch.compile(options=...)`: keys that are no attribute are strategy parameters.

        Raises:
            RecipeError: as `load`; names of parameters are checked by `strategies.get`.
        """
        given = dict(options)
        own = {key: given.pop(key) for key in list(given) if key in _NAMES}
        parameters = own.get("parameters", {})
        if isinstance(parameters, Mapping):
            if twice := sorted(set(given) & set(cast("Mapping[str, Any]", parameters))):
                raise RecipeError(f"options: {twice[0]!r} is given twice, also in 'parameters'")
            own["parameters"] = {**parameters, **given}
        return cls._build(own, "options")

    @classmethod
    def _build(cls, content: Mapping[Any, Any], source: str) -> Self:
        for key in content:
            if key not in _NAMES:
                raise RecipeError(f"{source}: unknown key {key!r}. {nearest(str(key), _NAMES)}")
        if "strategy" not in content:
            raise RecipeError(f"{source}: no 'strategy' given; `dynaflow strategies` lists them")
        _check(content, source)
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        """All attributes by name, with `parameters` as a dict of its own."""
        values = {name: getattr(self, name) for name in _NAMES}
        if isinstance(self.parameters, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            values["parameters"] = dict(self.parameters)
        if _refused("nccl", self.nccl) is None:
            values["nccl"] = {stream: dict(given) for stream, given in self.nccl.items()}
        return values

    @property
    def streams(self) -> dict[str, StreamOptions]:
        """`nccl`, by stream."""
        return {stream: StreamOptions(**given) for stream, given in self.nccl.items()}

    def dump(self, path: str | Path) -> None:
        """Writes a file that `load` reads back to an equal recipe."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        Path(path).write_text(text, encoding="utf-8")


_NAMES = tuple(f.name for f in dataclasses.fields(Recipe))
_OF_STREAM = tuple(f.name for f in dataclasses.fields(StreamOptions))


def nearest(name: str, names: Collection[str]) -> str:
    """A sentence for a message about an unknown name: the nearest that exists, then all."""
    if not names:
        return "There are none."
    near = difflib.get_close_matches(name, names, 1)
    listed = f"There are {', '.join(names)}."
    return f"Did you mean {near[0]!r}? {listed}" if near else listed


def _check(content: Mapping[str, Any], source: str) -> None:
    for name, value in content.items():
        if allowed := _refused(name, value):
            kind = type(value).__name__
            raise RecipeError(f"{source}: {name!r} must be {allowed}, found {value!r} ({kind})")
        if name == "transfer_chunks" and value > 1 and content.get("transfer") != "copy_engine":
            raise RecipeError(
                f"{source}: transfer_chunks {value} is for transfer: copy_engine, found "
                f"{content.get('transfer', 'group')}; say so, or leave it out"
            )
        if name == "nccl":
            for stream, given in value.items():
                _check_stream(stream, given, f"{source}: nccl of stream {stream!r}")


def _check_stream(stream: str, given: Mapping[Any, Any], source: str) -> None:
    for key in given:
        if key not in _OF_STREAM:
            raise RecipeError(f"{source}: unknown key {key!r}. {nearest(str(key), _OF_STREAM)}")
    _check(given, source)
    if not given:
        raise RecipeError(f"{source}: says nothing; give {', '.join(_OF_STREAM)} or leave it out")
    least, most = given.get("min_ctas", 1), given.get("max_ctas")
    if most is not None and least > most:
        raise RecipeError(f"{source}: min_ctas {least} is above max_ctas {most}; lower it")
    if stream == "compute" and "priority" in given:
        raise RecipeError(
            f"{source}: 'compute' is the caller's own stream, its priority is set where the caller "
            "makes it; leave priority out"
        )


def _refused(name: str, value: object) -> str | None:
    """What `name` may hold, when `value` is not that."""
    if name in _CHOICES:
        ok, allowed = value in _CHOICES[name], f"one of {_CHOICES[name]}"
    elif name in _LEAST:
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST[name]
        allowed = f"a whole number of at least {_LEAST[name]}"
    elif name == "agree_timeout_s":
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        allowed = "a number of seconds above 0"
    elif name in {"strict", "verify", "cuda_graphs"}:
        ok, allowed = isinstance(value, bool), "true or false"
    elif name == "parameters":
        ok = isinstance(value, Mapping) and all(
            isinstance(key, str) for key in cast("Mapping[object, object]", value)
        )
        allowed = "a mapping of parameter names to values"
    elif name == "nccl":
        ok = isinstance(value, Mapping) and all(
            isinstance(stream, str) and isinstance(given, Mapping)
            for stream, given in cast("Mapping[object, object]", value).items()
        )
        allowed = f"a mapping of streams' names to mappings with {', '.join(_OF_STREAM)}"
    else:
        ok, allowed = isinstance(value, str), "text"
        if name == "strategy":
            ok, allowed = ok and bool(value), "the name of a strategy"
    return None if ok else allowed


RECIPE_VARIABLE = "DYNAFLOW_RECIPE"
TIMEOUT_VARIABLE = "DYNAFLOW_AGREE_TIMEOUT"
CACHE_VARIABLE = "DYNAFLOW_CACHE"
_OWN = {RECIPE_VARIABLE, TIMEOUT_VARIABLE, CACHE_VARIABLE}
SYMMETRIC_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    SYMMETRIC_MULTICAST: "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_WATCHED = (*MULTICAST_OFF, "NCCL_P2P_DISABLE", CONNECTIONS_VARIABLE)


@dataclass(frozen=True)
class Environment:
    """What the environment says that matters here, as it was when it was read.

    Attributes:
        recipe: path of the recipe that the launcher set, or None.
        agree_timeout_s: seconds that override every recipe's, or None.
        rank, world_size, local_rank: of the launcher (torchrun, accelerate), or None.
        variables: the communication libraries' variables that are set, as text.
        cache: folder of what `auto` remembers, or None if `DYNAFLOW_CACHE` is "off".
        unknown: names that begin with DYNAFLOW_ and that nothing reads.
    """

    recipe: str | None = None
    agree_timeout_s: float | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    cache: Path | None = None
    unknown: tuple[str, ...] = ()

    @property
    def multicast_off(self) -> bool:
        """Whether all three libraries are told to leave NVLink multicast alone."""
        return all(self.variables.get(name) == off for name, off in MULTICAST_OFF.items())

    @property
    def p2p_off(self) -> bool:
        """Whether NCCL is told to go through host memory."""
        return self.variables.get("NCCL_P2P_DISABLE") == "1"


def _number(name: str, kind: type[int] | type[float]) -> Any:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if value < 0:
        raise RecipeError(f"environment: {name} must be a number of at least 0, found {text!r}")
    return value


def environment() -> Environment:
    """Reads the environment now.

    Raises:
        RecipeError: a variable that must be a number is none.
    """
    return Environment(
        recipe=os.environ.get(RECIPE_VARIABLE) or None,
        agree_timeout_s=_number(TIMEOUT_VARIABLE, float),
        rank=_number("RANK", int),
        world_size=_number("WORLD_SIZE", int),
        local_rank=_number("LOCAL_RANK", int),
        variables={name: os.environ[name] for name in _WATCHED if name in os.environ},
        cache=_cache(),
        unknown=tuple(
            name for name in sorted(os.environ) if name.startswith("DYNAFLOW_") and name not in _OWN
        ),
    )


def without_multicast() -> None:
    """Symmetric memory that this process makes from now on leaves NVLink multicast alone."""
    os.environ.setdefault(SYMMETRIC_MULTICAST, MULTICAST_OFF[SYMMETRIC_MULTICAST])


def _cache() -> Path | None:
    folder = os.environ.get(CACHE_VARIABLE)
    if folder == "off":
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynaflow"
    return Path(folder) if folder else default


def for_child(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started from here, with these changes."""
    return {**os.environ, **changes}


@contextmanager
def exported_recipe(path: str | Path) -> Generator[None]:
    """Within it, this process and its children find the recipe in the environment."""
    before = os.environ.get(RECIPE_VARIABLE)
    os.environ[RECIPE_VARIABLE] = str(Path(path).resolve())
    try:
        yield
    finally:
        if before is None:
            del os.environ[RECIPE_VARIABLE]
        else:
            os.environ[RECIPE_VARIABLE] = before
