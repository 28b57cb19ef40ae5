"""Everything a case is run with: baselines, our strategies, and the same without collectives.

A new baseline is one function from a `Bed` to a step, and a line in `BASELINES`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dynaflow_train import api
from dynaflow_train.benchmarks import dtensor, specs
from dynaflow_train.benchmarks.job import HF, HF_SP, MEGATRON, MEGATRON_SP, OF_HF, SINGLE
from dynaflow_train.benchmarks.models import build, share
from dynaflow_train.benchmarks.specs import COPIES, GRAPH, TOGETHER
from dynaflow_train.benchmarks.steps import Batch, Clock, GraphStep, PlainStep
from dynaflow_train.benchmarks.within import Within, removed
from dynaflow_train.capture import correct_gradients
from dynaflow_train.execute.graphs import UNTIL_RECORDED
from dynaflow_train.integrations import functions
from dynaflow_train.strategies.auto import Auto
from dynaflow_train.strategies.flux import Flux
from dynaflow_train.strategies.tokenweave import TokenWeave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dynaflow_train.benchmarks.cases import Case
    from dynaflow_train.benchmarks.data import Averages
    from dynaflow_train.strategy import Strategy

WITHOUT = ", no collectives"
NVLINK = ("nvlink",)


@dataclass
class Bed:
    """Where the variants of one case are made.

    Attributes:
        mesh: the ranks.
        executor: what compiles: "inductor", or "eager" for a rehearsal.
        batch: what every step reads.
        weights: the first sharded model, whose parameters the others use.
        in_parts: whether the sequence is cut between blocks.
        data: averages gradients over copies of the model; None: there is one.
    """

    case: Case
    device: torch.device
    dtype: torch.dtype
    mesh: Any
    executor: Literal["inductor", "eager"]
    clock: Clock
    batch: Batch = field(init=False)
    weights: torch.nn.Module | None = None
    in_parts: bool = False
    data: Averages | None = None

    def made(self) -> torch.nn.Module:
        """A tensor-parallel model, always with the same weights."""
        given = (self.case, self.device, self.dtype)
        return build(*given, mesh=self.mesh, in_parts=self.in_parts)

    def whole(self, dtype: torch.dtype) -> torch.nn.Module:
        """The model on one rank, weights as rounded for the others."""
        cut = self.case.cut(self.mesh.size()) // self.mesh.size()
        model: Any = build(self.case, self.device, self.dtype, cut=cut)
        return model.to(dtype)

    def averaged(self, name: str) -> Sequence[Any]:
        """Groups over which a parameter's gradient is averaged."""
        del name
        return (self.data.group,) if self.data is not None else ()

    def watch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Have the model's gradients averaged over its copies, if there are."""
        if self.data is not None:
            self.data.watch(model)
        return model

    def sharded(self, *, own: bool = False, **made: Any) -> torch.nn.Module:
        """A model shared by the ranks, on shared weights unless it wants its own."""
        model = self.made(**made)
        if own:
            return self.watch(model)
        if self.weights is None:
            self.weights = self.watch(model)
        else:
            share(model, self.weights)
        return model

    def shipped(self) -> torch.nn.Module:
        """The host's own."""
        return self.sharded()

    def scheduled(self, strategy: Strategy, **options: Any) -> torch.nn.Module:
        """By a strategy, on the whole stack of layers."""
        return api.compile(self.sharded(), strategy, executor=self.executor, **options)

    def facts(self) -> dict[str, Any]:
        """What there is to say of the case itself, on every rank; all ranks must ask."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """Of a step."""
        return self.case.inputs(self.device, self.dtype)

    def bare(self) -> torch.nn.Module:
        """A model of the same local shapes without collectives, nor averages over copies."""
        if self.in_parts:
            return Within(self.made(), functools.partial(removed, functions))
        cut = self.case.cut(self.mesh.size())
        return build(self.case, self.device, self.dtype, cut=cut)

    def compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        """With torch.compile for each layer, which is how users compile them."""
        for layer in api.layers_of(model)[1]:
            layer.compile(backend="inductor" if self.executor == "inductor" else "aot_eager")
        return Within(model, correct_gradients) if self.in_parts else model


@dataclass(frozen=True)
class Variant:
    """One way to run a case.

    Attributes:
        make: builds it; nothing is compiled before the first call.
        kind: "baseline", "ours", or "without" (collectives removed).
        graph: whether it needs CUDA graphs.
        warmups: steps before it is timed.
        ranks: whether it needs several.
        links: those on which it runs, as its ranks reach each other's memory; (): any.
        afresh: compile without Inductor's cache of graphs.
        idle: why its kernels have nothing to replace in this host's layers, or "".
    """

    name: str
    make: Callable[[Bed], PlainStep]
    kind: Literal["baseline", "ours", "without"] = "baseline"
    graph: bool = False
    warmups: int = 5
    ranks: bool = False
    links: tuple[str, ...] = ()
    afresh: bool = False
    idle: str = ""

    def why_not(self, device: torch.device, link: str) -> str | None:
        """Why it cannot run there, or None."""
        if self.graph and device.type != "cuda":
            return f"CUDA graphs need a CUDA device, this is {device.type}"
        if self.ranks and link == SINGLE:
            return "it is about what ranks exchange, this is one"
        if self.idle:
            return self.idle
        if self.links and link not in self.links:
            what = "async TP not applied: it" if dtensor.ASYNC in self.name else "it"
            return f"{what} needs GPUs with peer access, the link is {link}"
        return None


def eager(bed: Bed) -> PlainStep:
    """The host as shipped."""
    return PlainStep(bed.shipped(), bed.batch, bed.clock)


def compiled(bed: Bed) -> PlainStep:
    """torch.compile for each layer."""
    return PlainStep(bed.compiled(bed.sharded()), bed.batch, bed.clock)


def compiled_graph(bed: Bed) -> PlainStep:
    """The same, the whole step in one CUDA graph.

    On weights of its own: autograd's node of a shared one may stay from a step on another stream,
    which a capture refuses.
    """
    return GraphStep(bed.compiled(bed.sharded(own=True)), bed.batch, bed.clock)


def bare(bed: Bed) -> PlainStep:
    """`compiled`, collectives removed."""
    return PlainStep(bed.compiled(bed.bare()), bed.batch, bed.clock)


def bare_graph(bed: Bed) -> PlainStep:
    """`compiled_graph`, collectives removed."""
    return GraphStep(bed.compiled(bed.bare()), bed.batch, bed.clock)


EAGER, UNCUT = "eager", "compile"  # the host as shipped; the step that copies nothing for a cut
BASELINES = (
    Variant(EAGER, eager),
    Variant(UNCUT, compiled),
    Variant(UNCUT + GRAPH, compiled_graph, graph=True),
)
DTENSOR = (
    Variant(dtensor.NAME, functools.partial(dtensor.step, pipelined=False), ranks=True),
    Variant(
        dtensor.NAME + dtensor.ASYNC,
        functools.partial(dtensor.step, pipelined=True),
        ranks=True,
        links=NVLINK,
    ),
)
BARE = (
    Variant(UNCUT + WITHOUT, bare, "without"),
    Variant(UNCUT + GRAPH + WITHOUT, bare_graph, "without", graph=True),
)
STRATEGIES = (
    "sequential", "comm_overlap", "dual_batch", "nanoflow", "auto",
    "sequential+graph", "comm_overlap+graph", "dual_batch+graph", "nanoflow+graph", "auto+graph",
    "flux", "tokenweave", "flux+graph", "tokenweave+graph",
)  # fmt: skip
FLUX_RANKS = 2  # of `matmul_all_reduce`
ABLATION = (  # what is turned off, the whole, the whole without it
    ("CUDA graphs", "auto+graph", "auto"),
    ("dynamic choice", "auto+graph", "dual_batch+graph"),
    ("wgrad deferral", "dual_batch+graph", f"dual_batch {TOGETHER}+graph"),
    ("zero-copy merge buffers", "dual_batch+graph", "dual_batch+graph+copied"),
    ("deduplicated compilation", "dual_batch+graph", "dual_batch+graph+recompiled"),
    ("copy engine", "dual_batch+graph+copies", "dual_batch+graph"),
)


def bare_of(baseline: str, names: Sequence[str]) -> str:
    """The baseline's own step without collectives; plain `compile`'s where it has none."""
    own = baseline + WITHOUT
    return own if own in names else UNCUT + WITHOUT


def ours(bed: Bed, line: str) -> PlainStep:
    """A strategy."""
    spec = specs.read(line)
    model = bed.scheduled(spec.strategy, **spec.options)
    for session in api.sessions(model):
        for name in spec.off:
            setattr(session.compiler, name, False)
    return PlainStep(model, bed.batch, bed.clock)


def warmups(strategy: Strategy, *, graph: bool) -> int:
    """Steps until nothing changes any more: `auto` has chosen; then it is measured and recorded."""
    if not isinstance(strategy, Auto):
        return 10
    each = strategy.warmups + strategy.samples + (UNTIL_RECORDED if graph else 0)
    return each * len(strategy.alternatives) + 10


def idle(strategy: Strategy, host: str, ranks: int) -> str:
    """Why a strategy's kernels have nothing to replace in a host's layers, or ""."""
    in_parts = host in (HF_SP, MEGATRON_SP)
    if isinstance(strategy, Flux) and not in_parts and ranks != FLUX_RANKS:
        return (
            f"without sequence parallelism flux fuses the all-reduces of {FLUX_RANKS} ranks, these "
            f"are {ranks}: take --host {HF_SP} or {MEGATRON_SP}"
        )
    if isinstance(strategy, TokenWeave) and in_parts:
        return (
            "tokenweave fuses all-reduces, of which sequence parallelism has none: take --host "
            f"{HF if host == HF_SP else MEGATRON}"
        )
    return ""


def without_experts(variant: Variant) -> str:
    """Why a variant is not for layers with experts, or ""."""
    if variant.graph:
        return "the host reads how many rows each expert gets, which no CUDA graph can hold"
    if variant.name.startswith(dtensor.NAME):
        return "it shards dense layers, here the ranks share experts"
    if variant.name.split()[0] in (Flux.name, TokenWeave.name):
        return "it fuses collectives of dense layers, here the ranks exchange rows"
    if COPIES in variant.name:
        return "the copy engine carries no all-to-all of rows"
    return ""


def only_experts(spec: specs.Spec) -> str:
    """Why a line is not for dense layers, or ""."""
    if specs.RESERVE in spec.options:
        return "products of experts leave SMs free, here are none"
    return ""


def variants(
    lines: Sequence[str],
    *,
    ablation: bool = False,
    host: str = HF,
    ranks: int = FLUX_RANKS,
    experts: bool = False,
) -> list[Variant]:
    """Baselines, strategies, and the steps without collectives, in the order of their turns.

    `experts`: for layers with experts, some have a reason not to run.

    Raises:
        RecipeError: as `specs.read`.
    """
    asked = [*lines, *(name for _, *pair in ABLATION for name in pair if ablation)]
    found = [*BASELINES, *(DTENSOR if host in OF_HF else ())]
    for line in dict.fromkeys(asked):
        spec, make = specs.read(line), functools.partial(ours, line=line)
        ready = warmups(spec.strategy, graph=spec.graph)
        fused, copies = isinstance(spec.strategy, Flux | TokenWeave), "transfer" in spec.options
        links = NVLINK if fused else (*NVLINK, "gloo") if copies else ()
        reason = idle(spec.strategy, host, ranks) or ("" if experts else only_experts(spec))
        rest = (bool(links), links, "reuse" in spec.off, reason)
        found.append(Variant(line, make, "ours", spec.graph, ready, *rest))
    found += BARE
    if experts:
        found = [dataclasses.replace(v, idle=without_experts(v) or v.idle) for v in found]
    return found
