"""Draws what ran beside what: a picture (streams x time) and a trace that opens in Perfetto."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaflow_train.report import explain, exposed_spans
from dynaflow_train.strategy import COMM, COMPUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynaflow_train.ir import Interval, Launch, Plan, Region

COLOURS = ("#4C78A8", "#F2A541", "#54A24B", "#B279A2", "#72B7B2", "#9D755D", "#EECA3B", "#79706E")
MERGED, EXPOSED = "#8C8C8C", "#D62728"


@dataclass(frozen=True)
class Panel:
    """One plan with its times; several are drawn below each other on one time scale."""

    plan: Plan
    region: Region
    intervals: Sequence[Interval]
    title: str = ""

    @property
    def heading(self) -> str:
        """Title, or strategy and phase; with total time and the hidden share."""
        plan, found = self.plan, explain(self.plan, self.region, self.intervals)
        name = self.title or f"{plan.strategy}, {plan.phase}"
        share = f", {found.hidden_share:.0%} of communication hidden" if found.collectives else ""
        return f"{name}: {found.wall_ms:.2f} ms{share}"


def timeline(
    panels: Panel | Sequence[Panel],
    path: str | Path,
    *,
    title: str = "",
    last_ms: float | None = None,
) -> Path:
    """Writes a PNG or SVG (by the suffix of `path`) and returns its path.

    One colour a micro-batch, grey for what ran merged; collectives hatched; red where a collective
    was exposed: nothing computed beside it.

    Args:
        panels: what to draw, from top to bottom, on one time scale in milliseconds.
        path: where to.
        title: above all.
        last_ms: draw only so many milliseconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional extra

    shown = [panels] if isinstance(panels, Panel) else list(panels)
    lanes = [len(panel.plan.streams) for panel in shown]
    figure = Figure(figsize=(13, 0.6 * sum(lanes) + 0.75 * len(shown) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=lanes)[:, 0]
    end_ms = max((each.end_ms for panel in shown for each in panel.intervals), default=1.0)
    for axis, panel in zip(axes, shown, strict=True):
        _draw(axis, panel)
    axes[-1].set_xlim(0, last_ms or end_ms)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title)
    handles = _legend(shown)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=130)
    return Path(path)


def perfetto(panels: Panel | Sequence[Panel], path: str | Path) -> Path:
    """Writes a Chrome trace: one process a panel, one thread a stream; opens in ui.perfetto.dev."""
    shown = [panels] if isinstance(panels, Panel) else list(panels)
    events: list[dict[str, Any]] = []
    for process, panel in enumerate(shown):
        plan, region, streams = panel.plan, panel.region, panel.plan.streams
        events.append(_named("process_name", panel.heading, process))
        events += [_named("thread_name", name, process, at) for at, name in enumerate(streams)]
        exposed = exposed_spans(plan, region, panel.intervals)
        for each in panel.intervals:
            launch = plan.launches[each.launch]
            gaps = exposed.get(each.launch, ())
            events.append(
                {
                    "name": _label(launch),
                    "cat": region.op[launch.ops[0]].kind,
                    "ph": "X",
                    "ts": each.start_ms * 1000,
                    "dur": (each.end_ms - each.start_ms) * 1000,
                    "pid": process,
                    "tid": streams.index(launch.stream),
                    "args": {
                        "position": each.launch,
                        "micro_batches": list(launch.micro_batches),
                        "kernel": launch.kernel,
                        "waits": list(launch.waits),
                        "exposed_ms": sum(end - start for start, end in gaps),
                    },
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return Path(path)


def _draw(axis: Any, panel: Panel) -> None:
    plan, region = panel.plan, panel.region
    # Compute on top and the interconnect below, whatever was used first.
    order = sorted(plan.streams, key=lambda stream: (stream != COMPUTE, stream == COMM))
    lanes = {stream: index for index, stream in enumerate(order)}
    for each in panel.intervals:
        launch = plan.launches[each.launch]
        communication = region.op[launch.ops[0]].is_communication
        axis.barh(
            lanes[launch.stream],
            each.end_ms - each.start_ms,
            left=each.start_ms,
            height=0.8,
            color=_colour(launch),
            edgecolor="white",
            linewidth=0.4,
            hatch="////" if communication else None,
        )
    for position, spans in exposed_spans(plan, region, panel.intervals).items():
        lane = lanes[plan.launches[position].stream]
        pairs = [(start, end - start) for start, end in spans]
        axis.broken_barh(pairs, (lane + 0.3, 0.16), facecolors=EXPOSED)
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_title(panel.heading, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(shown: Sequence[Panel]) -> list[Any]:
    from matplotlib.patches import Patch  # noqa: PLC0415 - optional extra

    number = max(len(panel.plan.sizes) for panel in shown)
    merged = any(len(each.micro_batches) > 1 for panel in shown for each in panel.plan.launches)
    return [
        *(Patch(color=COLOURS[i % len(COLOURS)], label=f"micro-batch {i}") for i in range(number)),
        *([Patch(color=MERGED, label="merged")] if merged else []),
        Patch(facecolor="white", edgecolor="black", hatch="////", label="collective"),
        Patch(color=EXPOSED, label="exposed communication"),
    ]


def _colour(launch: Launch) -> str:
    part, *more = launch.micro_batches
    return MERGED if more else COLOURS[part % len(COLOURS)]


def _label(launch: Launch) -> str:
    return f"{' + '.join(launch.ops)}[{','.join(map(str, launch.micro_batches))}]"


def _named(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
