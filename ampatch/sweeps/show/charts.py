"""The charts of the page: the curves of each level beside those of O0, made of few points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ampatch.sweeps.rows import BASELINE, Curve, Level, Run, Sweep, Verdict, metric_names
from ampatch.tools.charts import BAD, O0, ROW, Chart, Points, draw

POINTS = 120  # of a curve, at most: a chart is 360 wide
METRICS_DRAWN = 6  # the others are in sweep.json
LARGEST = 1e38  # of float32; a chart of larger numbers would show nothing else
OUTLIER = 8.0
LESS_ACCURATE = (Verdict.WORSE, Verdict.DIVERGED, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class LevelCurve:
    """A curve of one level: the mean over its runs."""

    row: Level
    mean: Points


def charts_of(sweep: Sweep) -> list[tuple[str, list[Chart]]]:
    """Returns the charts of each loss and metric that has any, after its name."""
    losses = list(dict.fromkeys(name for run in sweep.records for name in run.losses))
    curves = [
        (
            "Loss" if len(losses) == 1 else f"Loss {name}",
            curves_of(sweep, lambda run, name=name: run.losses.get(name)),
        )
        for name in losses
    ]
    for name in metric_names(sweep.rows, sweep.records)[:METRICS_DRAWN]:
        curves.append((name, curves_of(sweep, lambda run, name=name: run.metrics.get(name))))
    charts = [(name, charts_of_curves(name, found)) for name, found in curves]
    return [(name, group) for name, group in charts if group]


def curves_of(sweep: Sweep, read: Callable[[Run], Curve | None]) -> list[LevelCurve]:
    """Returns the curves of each level with any; runs that failed count where none finished."""
    found = []
    for row in sweep.rows:
        runs = [(run.failed, curve) for run in sweep.records if run.row == row.name and (curve := read(run))]
        there = [(failed, curve) for failed, curve in runs if curve.steps]
        curves = [curve for failed, curve in there if not failed] or [curve for _, curve in there]
        if curves:
            found.append(LevelCurve(row, mean_of(curves)))
    return found


def mean_of(curves: Sequence[Curve]) -> Points:
    """Returns the mean of curves; of long ones the means over parts of the steps.

    A point most of whose values are not finite has none.

    >>> mean_of([Curve((1, 2), (5.0, 7.0)), Curve((2, 3), (9.0, float("nan")))]).values
    array([ 5.,  8., nan])
    """
    steps = np.concatenate([curve.steps for curve in curves]).astype(float)
    values = np.concatenate([curve.values for curve in curves]).astype(float)
    is_long = max(len(curve.steps) for curve in curves) > POINTS
    _, part = np.unique(steps * POINTS // (steps.max() + 1) if is_long else steps, return_inverse=True)
    there = np.abs(values) <= LARGEST
    counts, finite = np.bincount(part), np.bincount(part, there)
    means = np.bincount(part, np.where(there, values, 0.0)) / np.maximum(finite, 1)
    enough = (finite > 0) & (2 * finite >= counts)
    return Points(np.bincount(part, steps) / counts, np.where(enough, means, np.nan))


def value_range(curves: Sequence[LevelCurve]) -> tuple[float, float] | None:
    """Returns the lowest and the highest value to show; what diverged or is far outside does not count."""
    trusted = [it for it in curves if it.row.verdict not in (Verdict.DIVERGED, Verdict.FAILED)]
    for group in (trusted, curves):
        values = np.concatenate([np.empty(0), *(it.mean.finite for it in group)])
        if values.size:
            inner_low, inner_high = np.quantile(values, [0.02, 0.98])
            reach = OUTLIER * (inner_high - inner_low) or np.inf
            return max(values.min(), inner_low - reach), min(values.max(), inner_high + reach)
    return None


def charts_of_curves(name: str, curves: Sequence[LevelCurve]) -> list[Chart]:
    """Returns a chart for each level but O0, with the mean of O0 behind it; all have the same axes."""
    shown = value_range(curves)
    # There is no chart of what has one value.
    if shown is None or shown[0] == shown[1] or all(it.mean.steps.size < 2 for it in curves):
        return []
    end = max(it.mean.steps[-1] for it in curves)
    o0 = next((it for it in curves if it.row.name == BASELINE), None)
    return [chart_of(name, it, o0, shown, end) for it in curves if it is not o0 or len(curves) == 1]


def chart_of(
    name: str, own: LevelCurve, o0: LevelCurve | None, shown: tuple[float, float], end: float
) -> Chart:
    """Returns the chart of a level's curves, with a cross where no finite value follows."""
    row, words = own.row, own.mean.describe()
    title = f"{name} of {row.name}" + (" beside O0" if o0 not in (None, own) else "")
    colour = O0 if row.name == BASELINE else BAD if row.verdict in LESS_ACCURATE else ROW
    if colour == BAD:
        words = f"{row.verdict}; {words}"
    curves = [(o0.mean, O0, 5.0)] if o0 else []
    curves.append((own.mean, colour, 1.5))
    return Chart(row.name, title, words, draw(curves, own.mean.break_off, shown, (1, max(end, 2))))
