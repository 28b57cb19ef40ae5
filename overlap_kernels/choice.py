"""Whether a fused kernel runs in place of its chain, and how: settled by measurement on the spot.

Every way to run it and the plain chain are timed in turn on all ranks, on random data of the
chain's own shapes; of each the slowest rank's median counts, so that all ranks choose alike. The
plain chain stays unless something beats it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from dynaflow_train.errors import KernelError
from dynaflow_train.overlap_kernels.matching import any_group, substitute

if TYPE_CHECKING:
    from dynaflow_train.overlap_kernels.dense import Fused
    from dynaflow_train.overlap_kernels.matching import Found
    from dynaflow_train.overlap_kernels.pool import Pool

Function = Callable[[list[Tensor]], Sequence[Tensor]]
PLAIN = "the plain chain"
ROUNDS, WARMUPS = 7, 2
AS_FAST = 1.03  # an earlier variant, which takes less from others, is kept if it is that close


@dataclass
class Host:
    """What the session lends a kernel that talks to other ranks.

    Attributes:
        pool: memory that ranks share.
        unreachable: group -> why its ranks cannot reach one another's memory, or "".
        compile: the chain as it would run without the kernel.
        strict: a kernel that cannot run is an error.
        warn: told once what does not run as asked.
        says: for the report.
        settled: what was chosen for a chain of these shapes.
    """

    pool: Pool
    unreachable: Callable[[str], str]
    compile: Callable[[fx.GraphModule], Function]
    strict: bool
    warn: Callable[[str], None]
    says: list[str] = field(default_factory=list)
    settled: dict[Any, Function] = field(default_factory=dict)

    def bind(self, kernel: Fused, graph: fx.GraphModule, lane: str) -> Function:
        """The kernel in its fastest form, or the plain chain.

        Raises:
            KernelError: it cannot run here, and the recipe is strict.
        """
        key = (kernel.name, lane, _text(graph))
        if key not in self.settled:
            with unset_fake_temporarily():
                self.settled[key] = self._settle(kernel, graph, lane)
        return self.settled[key]

    def _settle(self, kernel: Fused, graph: fx.GraphModule, lane: str) -> Function:
        found = kernel.find(graph, self.pool.device)
        rest = found if isinstance(found, str) else substitute(graph, found, _nothing)
        why, group = rest if isinstance(rest, str) else "", any_group(graph.graph)
        if group is None:
            return self._plain(kernel, graph, why)
        others = (text for text in self.pool.ask(group, why) if text)  # all ranks do alike
        why = next(others, "") or self.unreachable(group)
        if why or isinstance(found, str):
            return self._plain(kernel, graph, why)
        space = self.pool.take(kernel.name, found.group, lane, kernel.nbytes(found))
        variants = kernel.variants(found, space)
        if not variants:
            return self._plain(kernel, graph, f"it does not run on {space.world} ranks")
        functions = {name: _within(graph, found, run) for name, run in variants.items()}
        functions[PLAIN] = self.compile(graph)
        inputs = [_random(n, self.pool.device) for n in graph.graph.nodes if n.op == "placeholder"]
        times = measure(functions, inputs, lambda text: self.pool.ask(found.group, text))
        space.check()
        chosen = choose(times)
        shape = " x ".join(str(list(n.meta["val"].shape)) for n in found.arguments[:2])
        told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(times.items(), key=_by_time))
        self.says.append(f"kernel {kernel.name}, {shape}: {chosen}, of {told}")
        return functions[chosen]

    def _plain(self, kernel: Fused, graph: fx.GraphModule, why: str) -> Function:
        text = f"kernel {kernel.name!r} cannot run here: {why}"
        said = f"{text}; the plain chain runs"
        if self.strict:
            raise KernelError(f"{text}. Leave strict off to run the chain without it.")
        if said not in self.says:
            self.says.append(said)
            self.warn(f"{text}. The plain chain runs in its place.")
        return self.compile(graph)


def measure(
    functions: dict[str, Function], inputs: list[Tensor], exchange: Callable[[str], list[str]]
) -> dict[str, float]:
    """Milliseconds by name, the slowest rank's median; all ranks call it alike."""
    clock = _on_gpu if inputs[0].is_cuda else _on_cpu
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(WARMUPS + ROUNDS):
        for name, function in functions.items():
            ms = clock(lambda function=function: function(list(inputs)))
            taken[name] += [ms] if number >= WARMUPS else []
    own = json.dumps({name: statistics.median(each) for name, each in taken.items()})
    every: list[dict[str, float]] = [json.loads(text) for text in exchange(own)]
    return {name: max(each[name] for each in every) for name in functions}


def choose(times: dict[str, float]) -> str:
    """The first that is as fast as the fastest, or the plain chain if nothing beats it."""
    others = {name: ms for name, ms in times.items() if name != PLAIN}
    best = min(others.values())
    if best >= times[PLAIN]:
        return PLAIN
    limit = min(best * AS_FAST, times[PLAIN])
    return next(name for name, ms in others.items() if ms <= limit)


def _by_time(item: tuple[str, float]) -> float:
    return item[1]


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _on_gpu(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _within(graph: fx.GraphModule, found: Found, run: Any) -> Function:
    """The chain with the kernel in it."""
    forward = substitute(graph, found, run).forward  # type: ignore[union-attr]  # checked before
    return lambda inputs: forward(*inputs)


def _nothing(*_: Tensor) -> tuple[Tensor, ...]:
    return ()


def _random(node: fx.Node, device: torch.device) -> Tensor:
    like = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return made.normal_() if like.is_floating_point() else made.zero_()


def _text(graph: fx.GraphModule) -> str:
    """What the chain computes, without the names of its values."""
    numbers = {node: f"%{at}" for at, node in enumerate(graph.graph.nodes)}
    lines: list[str] = []
    for node in graph.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        known = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else ""
        args = map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = node.target if node.op == "call_function" else node.op
        lines.append(f"{target} {args} {known}")
    return "\n".join(lines)
