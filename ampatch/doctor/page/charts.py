"""The charts of a report: the loss scale, and the curves of the layers nearest to overflow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampatch.doctor.finding import Report
from ampatch.doctor.growth.curves import name_of
from ampatch.tools.charts import BAD, ROW, Chart, Points, draw

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
    curve, shown = Points(steps.astype(float), values), (scales.min(), scales.max())
    return [chart("Loss scale", "", words, curve, marks, shown)]


def layer_charts(title: str, quantity: str, layers: Sequence[dict], growth: dict | None) -> list[Chart]:
    """Returns a chart for each layer, all with the same axes; a cross is where it overflowed."""
    steps = np.array(growth["attempts"] if growth else [], dtype=float)
    curves = [np.array(it[quantity], dtype=float) for it in layers]  # None becomes NaN
    shown = np.concatenate([np.empty(0), *(curve[np.isfinite(curve) & (curve > 0)] for curve in curves)])
    low, high = (shown.min(), shown.max()) if shown.size else (0.0, 0.0)
    if steps.size < 2 or low == high:
        return []
    found = []
    for layer, curve in zip(layers, curves, strict=True):
        broken = np.array(layer["headroom"], dtype=float) == 0
        points = Points(steps, np.where(curve > 0, curve, np.nan))
        marks = Points(steps[broken], np.full(broken.sum(), low if quantity == "headroom" else high))
        if broken.any() or (curve > 0).any():  # a ReLU has no gradients of weights
            found.append(chart(title, name_of(layer), points.describe(), points, marks, (low, high)))
    return found


def chart(
    title: str, name: str, words: str, curve: Points, marks: Points, shown: tuple[float, float]
) -> Chart:
    """Returns the chart of a curve, over attempts at a step."""
    curves = [(curve, BAD if marks.steps.size else ROW, 1.5)]
    whole = f"{title} of {name}" if name else title
    svg = draw(curves, marks, shown, (0, max(curve.steps[-1], 1)))
    return Chart(name or title, whole, words, svg)
