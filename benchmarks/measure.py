"""Measures one case on every rank of a group: prepare, time in turn, look closer."""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from dynaflow_train import api
from dynaflow_train.benchmarks import gradients, memory, profiling, timing
from dynaflow_train.benchmarks.cases import CASES, ExpertCase
from dynaflow_train.benchmarks.data import Averages
from dynaflow_train.benchmarks.job import HF, HF_SP, MEGATRON_SP, OF_HF
from dynaflow_train.benchmarks.steps import Batch, Clock, PlainStep
from dynaflow_train.benchmarks.variants import EAGER, Bed, Variant, variants
from dynaflow_train.errors import DynaFlowError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.benchmarks.gradients import Reference
    from dynaflow_train.benchmarks.job import Job

PATIENCE_S = 60.0  # how long a rank whose variant failed waits to hear of the others


@dataclass
class Prepared:
    """A variant that runs, and what it took to get there."""

    variant: Variant
    step: PlainStep
    facts: dict[str, Any]


class CaseRun:
    """One case on this rank.

    Attributes:
        skipped, failed: variants that do not run, with the reason.
    """

    def __init__(
        self, name: str, job: Job, device: torch.device, mesh: Any, store: Any, copies: Any = None
    ) -> None:
        self.copies = copies if job.copies > 1 else None
        self.case, self.job, self.mesh, self.store = CASES[name], job, mesh, store
        self.device, self.clock = device, Clock(device)
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.running: dict[str, Prepared] = {}

    def measure(self) -> dict[str, Any]:
        """Everything that was found, on every rank: raw times of all ranks and facts by variant.

        Raises:
            UnsupportedError: a run without P2P holds peer copies; or nothing to compare with runs.
        """
        bed = self._bed()
        _wake(self.device, self.job.executor)
        self._prepare_all(bed, self._variants())
        if EAGER not in self.running:
            raise UnsupportedError(f"eager does not run: {self.failed.get(EAGER)}")
        steps = {name: each.step for name, each in self.running.items()}
        times = timing.in_turn(steps, self.clock, self.job.rounds)
        errors = self._gradient_errors()
        for name, each in self.running.items():
            each.facts["cpu_ms"] = timing.cpu_ms(each.step, self.clock)
            each.facts["gradient_error"] = errors.get(name)
            each.facts |= self._profile(each) | _notes(each)
        mine = (times, {name: each.facts for name, each in self.running.items()})
        ranks: list[Any] = [None] * self.job.ranks
        dist.all_gather_object(ranks, mine)
        found = {
            name: {
                "kind": each.variant.kind,
                "times": [times[name] for times, _ in ranks],
                **_worst([facts[name] for _, facts in ranks]),
            }
            for name, each in self.running.items()
        }
        about = {"skipped": self.skipped, "failed": self.failed, **bed.facts()}
        return {"variants": found, **about}

    def _variants(self) -> list[Variant]:
        job = self.job
        return variants(
            job.strategies, ablation=job.ablation, host=job.host, ranks=job.ranks // job.copies,
            experts=isinstance(self.case, ExpertCase),
        )  # fmt: skip

    def _prepare_all(self, bed: Bed, chosen: Sequence[Variant]) -> None:
        """Those that can run; if the job asks, those with wrong gradients are taken out."""
        job, right = self.job, None
        for variant in chosen:
            if reason := variant.why_not(self.device, job.link):
                self.skipped[variant.name] = reason
                continue
            self._prepare(variant, bed)
            if EAGER not in self.running:  # it comes first, the others are cut as it is
                return
            if job.check and variant.kind != "without" and variant.name in self.running:
                right = right or gradients.reference(bed, self.running[EAGER].step)
                self._check(variant.name, right)

    def _bed(self) -> Bed:
        dtype = torch.bfloat16 if self.clock.is_cuda else torch.float32
        apart = isinstance(self.case, ExpertCase)  # ranks have tokens of their own
        copy = self.copies.get_local_rank() if self.copies is not None else 0
        torch.manual_seed(1 + (dist.get_rank() if apart else copy))
        given = (self.case, self.device, dtype, self.mesh, self.job.executor, self.clock)
        host = self.job.host
        if apart:
            bed = _experts(*given)
        elif host in OF_HF:
            data = Averages(self.copies.get_group()) if self.copies is not None else None
            bed = Bed(*given, in_parts=host == HF_SP, data=data)
        elif self.copies is None:
            bed = _megatron(host, *given)
        else:
            raise UnsupportedError(f"copies of a model are for --host {HF} or {HF_SP}, not {host}")
        inputs = bed.inputs()
        gradient = torch.randn_like(inputs["inputs_embeds"]) / self.case.hidden**0.5
        bed.batch = Batch(inputs, gradient.detach(), bed.data)
        return bed

    def _prepare(self, variant: Variant, bed: Bed) -> None:
        """Build, compile and warm up; on all ranks or on none."""
        found, error = None, ""
        try:
            with fresh_cache() if self.job.cold else contextlib.nullcontext():
                found = self._warm(variant, bed)
        except DynaFlowError as caught:
            error = str(caught)
        except Exception as caught:  # whatever it is, the other variants go on
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        texts = self._tell(f"{self.case.name}/{variant.name}", error)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failures:
            self.failed[variant.name] = failures[0]
        elif found is not None:
            self.running[variant.name] = found

    def _check(self, name: str, right: Reference) -> None:
        """Take a variant out, on all ranks, if its gradients are wrong on one."""
        texts = self._tell(f"{self.case.name}/{name}/gradients", right.wrong(
            self.running[name].step.gradients()
        ))  # fmt: skip
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failures:
            self.failed[name] = failures[0]
            del self.running[name]

    def _tell(self, key: str, text: str) -> list[str]:
        """Each rank's text. Through the store: a rank may be unable to run a collective."""
        keys = [f"{key}/{rank}" for rank in range(self.job.ranks)]
        self.store.set(keys[dist.get_rank()], f"={text}")
        limit_s = PATIENCE_S if text else self.job.limit_s
        self.store.wait(keys, timedelta(seconds=limit_s))
        return [self.store.get(each).decode()[1:] for each in keys]

    def _warm(self, variant: Variant, bed: Bed) -> Prepared:
        step = variant.make(bed)
        step.forget()  # gradients that another variant left on shared weights
        before, graphs = memory.held_mib(self.device), memory.graph_mib(self.device)
        start = time.perf_counter()
        with inductor.patch(fx_graph_cache=not variant.afresh and inductor.fx_graph_cache):
            step()
            self.clock.finish()
            facts: dict[str, Any] = {"first_step_s": time.perf_counter() - start}
            for _ in range(variant.warmups):
                step()
            self.clock.finish()
        facts |= {"ready_s": time.perf_counter() - start, "steps": 1 + variant.warmups}
        facts |= memory.peak_mib(step, self.device, before)
        if graphs is not None:
            facts["graph_mib"] = (memory.graph_mib(self.device) or 0.0) - graphs
        return Prepared(variant, step, facts)

    def _gradient_errors(self) -> dict[str, float]:
        """Relative difference of all gradients from eager's, by norm; eager's own is its noise."""
        plain = [g.clone() for g in self.running[EAGER].step.gradients()]
        scale = sum(float(g.float().square().sum()) for g in plain)
        found: dict[str, float] = {}
        for name, each in self.running.items():
            if each.variant.kind == "without":
                continue
            pairs = zip(each.step.gradients(), plain, strict=True)
            off = sum(float((g.float() - p.float()).square().sum()) for g, p in pairs)
            found[name] = (off / scale) ** 0.5
        return found

    def _profile(self, each: Prepared) -> dict[str, Any]:
        events = profiling.record(each.step, self.clock)
        if self.job.link == "no-p2p" and (found := profiling.peers(events)):
            raise UnsupportedError(
                f"{each.variant.name!r} reaches its peers in a run without P2P, where only NCCL "
                f"may communicate: the profiler saw {', '.join(found[:3])}. Leave that variant out"
            )
        item = each.step.batch.gradient.element_size()
        copied = profiling.copies(events, item)
        facts: dict[str, Any] = {"copies": copied.count, "copied_bytes": copied.size}
        if self.clock.is_cuda:
            seen = profiling.communication(events)
            facts |= {"communication_ms": seen.ms, "hidden_ms": seen.hidden_ms}
        return facts


def _wake(device: torch.device, executor: str) -> None:
    """Load what compiles, so that the first variant's start does not pay for it."""
    backend = "inductor" if executor == "inductor" else "aot_eager"
    once: Any = torch.compile(lambda x, w: (x @ w).relu().sum(-1), backend=backend, dynamic=False)
    x, w = (torch.randn(32, 32, device=device, requires_grad=True) for _ in range(2))
    with fresh_cache():
        once(x, w).sum().backward()


def _megatron(host: str, *given: Any) -> Bed:
    from dynaflow_train.benchmarks.megatron import MegatronBed  # noqa: PLC0415 - need not be there

    return MegatronBed(*given, sequence_parallel=host == MEGATRON_SP)


def _experts(*given: Any) -> Bed:
    from dynaflow_train.benchmarks.moe import ExpertBed  # noqa: PLC0415 - measure imports no model

    return ExpertBed(*given)


def _notes(each: Prepared) -> dict[str, Any]:
    """What our engine says of itself: choices, graphs, why it runs uncut; what recording took."""
    model = each.step.model
    if each.variant.kind != "ours":
        return {"recorded_ms": each.step.recorded_ms, "says": getattr(each.step, "says", "")}
    found = api.explain(model)
    recordings = [
        entry.recordings
        for session in api.sessions(model)
        for capture in session.captures
        for runner in capture.runners
        for entry in runner.entries.values()
        if entry.recordings is not None
    ]
    recorded = sum(each.milliseconds for each in recordings) if recordings else None
    reasons = dict.fromkeys(p.plan.reason for p in api.plans(model) if p.plan.reason)
    uncut = [f"ran uncut: {reason}" for reason in reasons]
    words = [*map(str, found.choices), *found.kernels, *found.graphs, *found.nccl, *uncut]
    return {"recorded_ms": recorded, "says": "\n".join(words)}


def _worst(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: the largest number; sums of what is intersected; the first rank's words."""
    merged: dict[str, Any] = dict(facts[0])
    for key, value in facts[0].items():
        values = [each[key] for each in facts]
        if isinstance(value, str):
            continue
        if any(each is None for each in values):
            merged[key] = None
        else:
            both = key in {"communication_ms", "hidden_ms"}
            merged[key] = sum(values) / len(values) if both else max(values)
    return merged
