"""One picture a case: a bar a variant with its quartiles, the limit as a line, a panel a link."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING, Any

from dynaflow_train.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dynaflow_train.benchmarks.report import Judged

COLOURS = {"baseline": "#8C8C8C", "ours": "#4C78A8", "without": "#D9D9D9"}
WORDS = {"baseline": "baseline", "ours": "dynaflow", "without": "collectives removed"}
LIMIT = "#D62728"


def check() -> None:
    """Refuse before anything is measured.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    if util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "charts need matplotlib, which is not installed: pip install 'dynaflow-train[plot]', "
            "or pass --no-charts"
        )


def draw(links: Sequence[Judged], path: Path) -> Path:
    """Writes SVG or PNG (by the suffix of `path`) and returns its path.

    Args:
        links: one case, on each link that was measured.
        path: where to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional extra

    ran = [[row for row in each.rows if row["ms"] is not None] for each in links]
    height = 1.4 + 0.32 * max(map(len, ran))
    figure = Figure(figsize=(2.6 + 5.4 * len(links), height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(links), squeeze=False)[0]
    for axes, judged, rows in zip(panels, links, ran, strict=True):
        _panel(axes, judged, rows)
    handles: list[Any] = _legend()
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path)
    return path


def _panel(axes: Any, judged: Judged, rows: Sequence[dict[str, Any]]) -> None:
    places = range(len(rows))
    ms = [row["ms"] for row in rows]
    spread = (
        [row["ms"] - row["q1_ms"] for row in rows],
        [row["q3_ms"] - row["ms"] for row in rows],
    )
    colours = [COLOURS[row["kind"]] for row in rows]
    axes.barh(places, ms, xerr=spread, color=colours, error_kw={"lw": 1, "capsize": 2})
    for place, row in enumerate(rows):
        share = "" if row["kind"] != "ours" or row["E"] is None else f"  E {row['E']:.2f}"
        axes.text(row["q3_ms"], place, f"  {row['ms']:.4g}{share}", va="center", fontsize=8)
    if judged.limit_ms == judged.limit_ms:  # not a number without a step without collectives
        axes.axvline(judged.limit_ms, color=LIMIT, lw=1.2, ls="--")
    axes.set_yticks(places, [row["variant"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(row["q3_ms"] for row in rows) * 1.2)
    axes.set_xlabel("forward + backward, ms (median, quartiles)")
    first = rows[0]
    axes.set_title(
        f"{judged.case}, {judged.place}\n{first['ranks']} x {first['device']}, {first['rounds']} "
        f"rounds, torch {first['version_torch']}",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - optional extra
    from matplotlib.patches import Patch  # noqa: PLC0415 - optional extra

    boxes = [Patch(color=COLOURS[kind], label=word) for kind, word in WORDS.items()]
    return [*boxes, Line2D([], [], color=LIMIT, ls="--", label="limit")]
