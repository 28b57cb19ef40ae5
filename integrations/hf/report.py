"""What a Trainer run is told about its recipe: one line at the start, files at the end."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from dynaflow_train import api
from dynaflow_train.schedule.plot import perfetto, timeline

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynaflow_train.ir import Region


def graph_breaks() -> int:
    """How often Dynamo broke a graph in this process so far."""
    return sum(counters["graph_break"].values())


def captured(model: nn.Module, breaks: int) -> str:
    """What the first step captured: layers, ops, collectives, and why it was not cut, if so.

    Args:
        model: compiled; has run a step.
        breaks: graph breaks in that step.
    """
    used, sessions = api.plans(model), api.sessions(model)
    if not used:
        return "dynaflow: captured nothing; the model's layers did not run in training mode."
    recipe, (_, layers) = sessions[0].recipe, api.layers_of(model)
    counts = [
        f"{phase} {sum(len(r.ops) for r in regions)} ops, {_communications(regions)} collectives"
        for phase in ("forward", "backward")
        if (regions := [each.region for each in used if each.plan.phase == phase])
    ]
    sizes = ", ".join(str(list(each)) for each in dict.fromkeys(u.plan.sizes for u in used))
    text = (
        f"dynaflow: {recipe.strategy}, {len(layers)} layers, region {recipe.region!r}: "
        f"{'; '.join(counts)}; {breaks} graph breaks; micro-batches {sizes}"
    )
    reasons = dict.fromkeys(each.plan.reason for each in used if each.plan.reason)
    return "; sequential: ".join([text, *reasons])


def _communications(regions: list[Region]) -> int:
    return sum(op.is_communication for region in regions for op in region.ops)


def hidden_share(model: nn.Module) -> float | None:
    """Share of the communication time beside compute, 0 to 1; None before it was measured."""
    found = api.explain(model)
    return found.hidden_share if found else None


def verified(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The worst relative gradient error of all ranks against the plain step, and whose it is.

    Two more steps, and two more sets of gradients while they last. All ranks must call it.
    """
    model.train()
    found = api.verify(model, batch)
    name, error = found.worst
    if dist.is_initialized():
        worst: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(worst, (error, name))
        error, name = max(worst)
    return {"loss_error": found.loss, "gradient_error": error, "worst": name}


def write(model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `plan.txt`, `report.json`, `trace.json` and, with matplotlib, `timeline.png`.

    Args:
        model: compiled; has run.
        folder: where to; made if need be.
        facts: what else the report holds.
    """
    used, explained = api.plans(model), api.explain(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text("\n\n".join(map(str, [*used, *explained])), encoding="utf-8")
    report = {
        **facts,
        "hidden_share": explained.hidden_share if explained else None,
        "copied_bytes": sum(size for each in used for size in each.copies.values()),
        "graphs": list(explained.graphs),
        "torch": torch.__version__,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    panels = [each.panel for each in used if each.intervals]
    perfetto(panels, folder / "trace.json")
    if panels and importlib.util.find_spec("matplotlib"):
        timeline(panels, folder / "timeline.png")
