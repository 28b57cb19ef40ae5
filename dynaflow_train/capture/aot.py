"""AOTAutograd with Inductor's partition, decompositions and lowering-free compilers of our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from dynaflow_train.annotate import BACKWARD, Rule
from dynaflow_train.capture.labels import stamp_operators
from dynaflow_train.capture.slots import Slots, add_slots

Runner = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Captured:
    """One aten graph on its way to a runner, and the slots that forward and backward share."""

    graph: fx.GraphModule
    slots: Slots


@dataclass(frozen=True)
class Compilers:
    """What the backend does with the graphs.

    Attributes:
        slotted: forward graph -> the nodes of which every micro-batch has its own.
        forward, backward: graph -> boxed runner.
        inference: graph without a backward -> boxed runner.
    """

    slotted: Callable[[fx.GraphModule], Collection[fx.Node]]
    forward: Callable[[Captured], Runner]
    backward: Callable[[Captured], Runner]
    inference: Callable[[fx.GraphModule], Runner]


def boxed(runner: Runner) -> Runner:
    """Mark a runner as taking one list that it may empty."""
    runner._boxed_call = True  # type: ignore[attr-defined]
    return runner


def capture(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    compilers: Compilers,
    max_slots: int,
    rules: Collection[Sequence[Rule]] = (),
) -> Callable[..., Any]:
    """Trace forward and backward and hand each graph to its compiler.

    Args:
        gm: from Dynamo.
        example_inputs: from Dynamo.
        compilers: what is called with the graphs.
        max_slots: the greatest number of micro-batches.
        rules: sets of rules, of which those about operators are written into the graphs.

    Mutation of inputs, aliasing, saved-tensor hooks and recomputation stay AOTAutograd's. Random
    operators are kept as they are (`fallback_random`), so that masks are values like any other.
    """
    kept: dict[str, Slots] = {}

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        for each in rules:
            stamp_operators(joint.graph, each)
        for node in joint.graph.nodes:
            if (node.meta.get("custom") or {}).get(BACKWARD):
                node.meta["partitioner_tag"] = "must_be_in_backward"
        forward, backward = partition_fn(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        kept["slots"] = add_slots(
            forward, backward, num_fwd_outputs, compilers.slotted(forward), max_slots
        )
        return forward, backward

    def forward(graph: fx.GraphModule, _: Any) -> Runner:
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:  # nothing is donated; None would forbid retain_graph
            metadata.bw_donated_idxs = []
        return boxed(compilers.forward(Captured(graph, kept["slots"])))

    def backward(graph: fx.GraphModule, _: Any) -> Runner:
        return boxed(compilers.backward(Captured(graph, kept["slots"])))

    def inference(graph: fx.GraphModule, _: Any) -> Runner:
        return boxed(compilers.inference(graph))

    context = TracingContext.get()
    with (
        V.set_fake_mode(context.fake_mode),
        functorch_config.patch(unlift_effect_tokens=True, donated_buffer=False),
        inductor_config.patch(fallback_random=True),
    ):
        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=False,
        )(gm, example_inputs)
