"""What one compiled model shares over its regions: strategy, compiled ops, plans, reports."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch
import torch.distributed as dist

from dynaflow_train.choices import Choice, Chooser, machine
from dynaflow_train.config import environment, nearest
from dynaflow_train.errors import UnsupportedError
from dynaflow_train.execute import OpCompiler, Runner
from dynaflow_train.execute.compile import fresh
from dynaflow_train.execute.graphs import UNTIL_RECORDED, CudaRecorder, Recorder
from dynaflow_train.execute.groups import Groups
from dynaflow_train.execute.meta import Meta
from dynaflow_train.execute.specialise import Sizes, specialise
from dynaflow_train.execute.symmetric import Rings
from dynaflow_train.execute.trials import Trials
from dynaflow_train.overlap_kernels.choice import Host
from dynaflow_train.overlap_kernels.pool import Pool
from dynaflow_train.overlap_kernels.registry import Registry, default_registry
from dynaflow_train.partition.chain import chain
from dynaflow_train.schedule.agree import agree, gather
from dynaflow_train.schedule.record import record
from dynaflow_train.schedule.text import dumps, plan_hash
from dynaflow_train.strategy import Context, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.config import Recipe
    from dynaflow_train.execute.exchange import Connect
    from dynaflow_train.execute.totals import Totals
    from dynaflow_train.ir import Launch, Op, Plan, Region
    from dynaflow_train.strategies.auto import Auto


class DynaFlowWarning(UserWarning):
    """Something runs sequentially, and why."""


def check_torch(version: str) -> None:
    """Refuse what is older than was tested.

    Raises:
        UnsupportedError: torch is older than 2.11.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 11):
        raise UnsupportedError(
            f"dynaflow_train needs torch >= 2.11, found {version}: older ones trace collectives "
            f"and autograd.Functions differently. Install a newer torch."
        )


@dataclass
class Capture:
    """One captured graph pair: its regions and the runners that run them."""

    name: str
    forwards: list[Runner] = field(default_factory=list["Runner"])
    backwards: list[Runner] = field(default_factory=list["Runner"])
    trials: Trials | None = None
    choices: list[Choice] = field(default_factory=list[Choice])
    tokens: sympy.Expr = sympy.S.One
    why_not: str | None = None

    @property
    def runners(self) -> list[Runner]:
        """Those in use, forward first: of the candidates that were chosen, or of all."""
        kept = range(len(self.forwards)) if self.trials is None else self.trials.in_use()
        both = (self.forwards, self.backwards)
        return [runners[i] for runners in both for i in kept if i < len(runners)]


@dataclass
class Session:
    """State of one `compile` call; nothing of it is global.

    Attributes:
        strategy, recipe: what was asked for.
        compiler: compiled ops, shared over regions so that equal layers are compiled once.
        captures: what was captured so far, in order.
        groups: process groups of streams with options of their own.
        calls: how often captured graphs ran forward.
        warned: reasons that were told already.
        streams: those that any plan used, in order of first use.
        rings: memory for collectives by copies, once a plan asked for it.
        kernel_host: what fused kernels need, once a plan asked for one.
        totals: where the host collects gradients of parameters; None leaves them to autograd.
    """

    strategy: Strategy
    recipe: Recipe
    compiler: OpCompiler = field(init=False)
    groups: Groups = field(init=False)
    registry: Registry = field(default_factory=default_registry)
    captures: list[Capture] = field(default_factory=list)
    calls: int = 0
    warned: set[str] = field(default_factory=set)
    streams: dict[str, None] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    recorders: dict[torch.device, Recorder] = field(default_factory=dict["torch.device", Recorder])
    rings: Rings | None = None
    kernel_host: Host | None = None
    totals: Totals | None = None

    def __post_init__(self) -> None:
        check_torch(torch.__version__)
        self.compiler = OpCompiler(self.recipe.executor)
        self.groups = Groups(self.recipe.streams, self._heard, self.warn)

    @property
    def max_micro_batches(self) -> int:
        """Slots to make room for: the strategy's own number where it has one."""
        most, limit = self.strategy.most_micro_batches, self.recipe.max_micro_batches
        several = len(self.strategy.alternatives) > 1 or self.recipe.cuda_graphs
        least = 2 if several else 1  # with slots comes the ticket
        return max(min(limit, most or limit), least)

    def try_all(self, capture: Capture, identity: str) -> Trials:
        """Trials of the strategy's alternatives; `identity` names the graph."""
        auto, names = cast("Auto", self.strategy), tuple(self.strategy.alternatives)
        ops = [op for runner in capture.forwards for op in runner.facts.region.ops]
        groups = sorted({op.group for op in ops if op.group})
        shape = [f"{_group(group).size()} ranks" for group in groups]

        def exchange(text: str) -> list[str]:
            texts = [text]
            for group in groups:  # in turn, so that ranks who share no group agree as well
                texts = [json.dumps(sorted(set(texts)))]
                heard = gather(texts[0], **self._among(group, "choice"))
                texts = [each for one in heard for each in json.loads(one)]
            return texts

        graphs = self.recipe.cuda_graphs
        limits = [f"{stream} {options}" for stream, options in sorted(self.groups.options.items())]
        if self.recipe.transfer != "group":
            limits.append(f"transfer {self.recipe.transfer} {self.recipe.transfer_chunks}")
        known = (identity, *shape, *machine(), f"cuda_graphs {graphs}", *limits)
        chooser = Chooser(capture.name, names, known, exchange, auto.cache)
        capture.choices = chooser.found
        warmups = auto.warmups + (UNTIL_RECORDED if graphs else 0)
        return Trials(names, warmups, auto.samples, chooser.recall, chooser.settle, graphs)

    def plan(
        self,
        strategy: Strategy,
        capture: Capture,
        region: Region,
        symbols: dict[sympy.Symbol, int],
        batch: int,
        forward_sizes: tuple[int, ...] | None,
    ) -> Plan:
        """The strategy's plan for one context, agreed over the ranks of its collectives.

        Raises:
            ScheduleError, SplitError: see `schedule.record`.
            PlanMismatchError: another rank made another plan or did not answer in time.
        """
        groups = sorted({op.group for op in region.ops if op.group})
        sizes = {g: _group(g).size() for g in groups}
        context = Context(
            phase=region.phase,
            batch=batch,
            tokens=int(cast("Any", capture.tokens.xreplace(symbols))),
            device="cuda" if torch.cuda.is_available() else "cpu",
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            group_sizes=sizes,
            max_micro_batches=self.max_micro_batches,
            times=self.times.get(region.phase, {}),
            forward_sizes=forward_sizes,
        )
        strict = self.recipe.strict
        plan = record(strategy, region, context, self.registry.kernels, strict=strict)
        for group in groups:
            self._agree(plan, region, group)
        if plan.reason is not None:
            where = f"{region.name} {region.phase}"
            self.warn(f"{where} runs sequentially: {plan.reason}", plan.reason)
        self.streams |= dict.fromkeys(plan.streams)
        last = [*self.strategy.alternatives.values()][-1]
        if strategy is last and region.phase == "backward" and plan.reason is None:
            for text in self.unused():
                self.warn(text)
        return plan

    def unused(self) -> list[str]:
        """Streams that the recipe has options for, but no plan a launch on."""
        return [
            f"nccl has options for stream {stream!r}, but no launch is on it. "
            f"{nearest(stream, self.streams)}"
            for stream in self.groups.options
            if stream not in self.streams
        ]

    def _heard(self, group: str, text: str) -> list[str]:
        """What the group's ranks say in the same place."""
        return gather(text, **self._among(group, "nccl"))

    def _agree(self, plan: Plan, region: Region, group: str) -> None:
        """Compare with the group's other ranks."""
        agree(plan_hash(plan, region), dumps(plan), **self._among(group, region.phase))

    def _among(self, group: str, what: str) -> dict[str, Any]:
        """Whom to compare with, and under which key: comparisons are numbered alike on all."""
        ranks = _group(group)
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"dynaflow/ordinal/{group}/{ranks.rank()}", 1)
        return {
            "store": store,
            "rank": ranks.rank(),
            "world_size": ranks.size(),
            "key": f"{group}/{number}/{what}",
            "timeout_s": environment().agree_timeout_s or self.recipe.agree_timeout_s,
        }

    def warn(self, message: str, reason: str | None = None) -> None:
        """Say it once; what has the same reason elsewhere counts as the same."""
        reason = reason or message
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(message, DynaFlowWarning, stacklevel=3)

    def recorder(self, device: torch.device) -> Recorder | None:
        """What records calls as CUDA graphs, if the recipe asks for them."""
        if not self.recipe.cuda_graphs:
            return None
        if device.type != "cuda":
            self.warn(f"calls are not recorded: cuda_graphs needs CUDA, the model is on {device}.")
            return None
        if device not in self.recorders:
            self.recorders[device] = CudaRecorder(device)
        return self.recorders[device]

    def connector(self, device: torch.device) -> Connect | None:
        """What gives memory for collectives by copies, if the recipe asks for them."""
        if self.recipe.transfer == "group":
            return None
        if self.rings is None:
            self.rings = self._rings(device)
        return self.rings.connect

    def _rings(self, device: torch.device) -> Rings:
        chunks = self.recipe.transfer_chunks
        return Rings(device, environment(), self._ask, chunks, self._refuse)

    def hosted(self, device: torch.device) -> Host:
        """What fused kernels need."""
        if self.kernel_host is None:
            unreachable = self._rings(device).why_not
            strict, compile_chain = self.recipe.strict, self.compiler.chain
            pool = Pool(device, self._ask)
            self.kernel_host = Host(pool, unreachable, compile_chain, strict, self.warn)
        return self.kernel_host

    def _ask(self, group: str, text: str) -> list[str]:
        return gather(text, **self._among(group, "transfer"))

    def _refuse(self, why: str) -> None:
        if self.recipe.strict:
            raise UnsupportedError(f"transfer: copy_engine was asked for, but {why}")
        self.warn(why)

    def kernel(
        self,
        launch: Launch,
        ops: Sequence[Op],
        values: tuple[list[str], list[str]],
        metas: list[Meta],
        sizes: Sizes,
        device: torch.device,
    ) -> tuple[Any, list[tuple[Meta, bool]]]:
        """The function of a launch's kernel in place of `ops`.

        With it, of each output: its meta, and whether it has memory of its own.
        """
        static = specialise(chain(ops, *values), metas, sizes, {})
        name, host = str(launch.kernel), lambda: self.hosted(device)
        function = self.registry.find(name, static.graph, host, launch.stream)
        found = [Meta.of(t) for t in static.outputs]
        return function, list(zip(found, fresh(static), strict=True))


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(cast("Any", name))
