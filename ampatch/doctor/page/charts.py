"""The charts of a report: the loss scale, and the curves of the layers nearest to overflow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ampatch.doctor.finding import Report
from ampatch.doctor.growth.curves import name_of
from ampatch.sweeps.web.charts import BAD, INK, ROW, Chart, draw, paint_curve, set_ticks, set_values
from ampatch.sweeps.web.curves import Points

MOST_LAYERS = 6  # that have charts; the table and the CSV have more
SHOWN = {"headroom": "Headroom to overflow", "output": "Largest output", "gradient_norm": "Norm of gradients"}


def charts_of(report: Report, layers: Sequence[dict]) -> list[tuple[str, list[Chart]]]:
    """Returns the charts of each quantity, after its name; of `layers` the first have them."""
    nearest = sorted(layers[:MOST_LAYERS], key=report.growth["layers"].index) if report.growth else []
    charts = [("Loss scale", scale_charts(report))]
    for quantity, title in SHOWN.items():
        charts.append((title, layer_charts(title, quantity, nearest, report.growth)))
    return [(title, group) for title, group in charts if group]


def scale_charts(report: Report) -> list[Chart]:
    """Returns the chart of the loss scale, with a cross at each step that was skipped; none if it stays."""
    history = report.scale.get("history") or []
    if len(history) < 2 or not report.growth:
        return []
    steps = np.arange(max(report.growth["attempts"][-1], history[-1][0]) + 1)
    changes, scales = np.array(history, dtype=float).T
    values = scales[np.maximum(np.searchsorted(changes, steps, side="right") - 1, 0)]
    skipped = np.array([it for it in report.scale["skipped"] if it < steps.size], dtype=int)
    marks = Points(skipped.astype(float), values[skipped])
    words = f"from {scales[0]:g} to {scales[-1]:g}, {len(report.scale['skipped'])} steps skipped"
    return [
        chart(
            "Loss scale", "", words, Points(steps.astype(float), values), marks, (scales.min(), scales.max())
        )
    ]


def layer_charts(title: str, quantity: str, layers: Sequence[dict], growth: dict | None) -> list[Chart]:
    """Returns a chart for each layer, all with the same axes; a cross is where it overflowed."""
    steps = np.array(growth["attempts"] if growth else [], dtype=float)
    curves = [np.array(it[quantity], dtype=float) for it in layers]  # None becomes NaN
    shown = np.concatenate([np.empty(0), *(curve[np.isfinite(curve) & (curve > 0)] for curve in curves)])
    if steps.size < 2 or not shown.size or shown.min() == shown.max():
        return []
    found = []
    for layer, curve in zip(layers, curves, strict=True):
        broken = np.array(layer["headroom"], dtype=float) == 0
        values = np.where(curve > 0, curve, np.nan)
        marks = Points(
            steps[broken], np.full(broken.sum(), shown.min() if quantity == "headroom" else shown.max())
        )
        name = name_of(layer)
        found.append(
            chart(
                title,
                name,
                Points(steps, values).describe(),
                Points(steps, values),
                marks,
                (shown.min(), shown.max()),
            )
        )
    return found


def chart(
    title: str, name: str, words: str, curve: Points, marks: Points, shown: tuple[float, float]
) -> Chart:
    """Returns the chart of a curve, over attempts at a step."""

    def paint(axes: Axes) -> None:
        paint_curve(axes, curve, BAD if marks.steps.size else ROW, 1.5)
        axes.plot(marks.steps, marks.values, "x", color=INK, clip_on=False)
        set_values(axes, *shown)
        axes.set_xlim(0, max(curve.steps[-1], 1))
        axes.set_xlabel("step", loc="right", labelpad=1)
        set_ticks(axes.xaxis, MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))

    whole = f"{title} of {name}" if name else title
    return Chart(name or title, whole, words, draw(paint, whole))
