"""The charts of the page: the curves of each row beside those of O0."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ampatch.sweeps.records.sweep import BASELINE, Sweep, Verdict
from ampatch.sweeps.web.curves import RowCurves, each_step, lines_of, value_range
from ampatch.sweeps.web.tables import metric_names
from ampatch.tools.charts import BAD, O0, ROW, Chart, draw

METRICS_DRAWN = 6  # the others are in sweep.json
LESS_ACCURATE = (Verdict.WORSE, Verdict.DIVERGED, Verdict.FAILED)


def charts_of(sweep: Sweep) -> list[tuple[str, list[Chart]]]:
    """Returns the charts of each loss, metric and loss scale that has any, after its name."""
    measured = [it.measured for it in sweep.records if it.measured]
    losses = dict.fromkeys(name for it in measured for name in it.losses)
    scalers = dict.fromkeys(name for it in measured for name in it.loss_scales)
    lines = []
    for name in losses:
        found = lines_of(sweep, lambda it, name=name: it.losses.get(name))
        lines.append((numbered("Loss", name, losses), found))
    for name in metric_names(sweep)[:METRICS_DRAWN]:
        lines.append((name, lines_of(sweep, lambda it, name=name: it.metrics.get(name))))
    for name in scalers:
        found = lines_of(sweep, lambda it, name=name: each_step(it.loss_scales.get(name), it.steps))
        changing = [line for line in found if np.unique(line.values).size > 1]
        lines.append((numbered("Loss scale", name, scalers), changing))
    charts = [(name, curve_charts(name, found)) for name, found in lines]
    return [(name, group) for name, group in charts if group]


def numbered(thing: str, name: str, names: Collection[str]) -> str:
    """Returns what a loss is called: its id matters only where there are several."""
    return thing if len(names) == 1 else f"{thing} {name}"


def curve_charts(name: str, lines: Sequence[RowCurves]) -> list[Chart]:
    """Returns a chart for each row but O0, with the mean of O0 behind it; all have the same axes."""
    shown = value_range(lines)
    # There is no chart of what has one value.
    if shown is None or shown[0] == shown[1] or all(line.mean.steps.size < 2 for line in lines):
        return []
    end = max(it.steps[-1] for line in lines for it in (line.mean, *line.runs))
    baseline = next((line for line in lines if line.row.name == BASELINE), None)
    drawn = [line for line in lines if line is not baseline] or lines
    return [chart_of(name, line, baseline, shown, end) for line in drawn]


def chart_of(
    name: str, line: RowCurves, baseline: RowCurves | None, shown: tuple[float, float], end: float
) -> Chart:
    """Returns the chart of a row's curves, with a cross where no finite value follows."""
    row, words = line.row, line.mean.describe()
    title = f"{name} of {row.name}" + (" beside O0" if baseline not in (None, line) else "")
    colour = O0 if row.name == BASELINE else BAD if row.verdict in LESS_ACCURATE else ROW
    if colour == BAD:
        words = f"{row.verdict}; {words}"

    curves = [(baseline.mean, O0, 5.0)] if baseline else []
    curves += [(run, colour, 0.6) for run in line.runs] + [(line.mean, colour, 1.5)]
    return Chart(row.name, title, words, draw(title, curves, line.mean.break_off, shown, (1, max(end, 2))))


# ---- SVG ----
