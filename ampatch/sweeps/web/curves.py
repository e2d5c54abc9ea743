"""Curves of many runs made into few points that can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampatch.sweeps.records.record import Curve, Measured
from ampatch.sweeps.records.sweep import Sweep, SweepRow, Verdict
from ampatch.tools.charts import Points

POINTS = 120  # of a curve, at most: a chart is 360 wide
SEEDS_DRAWN = 8  # the file stays small with a hundred of them
LARGEST = 1e38  # of float32; a chart of larger numbers would show nothing else
OUTLIER = 8.0
EACH_STEP = 10_000  # of longer runs not every step is looked at

Read = Callable[[Measured], Curve | None]


@dataclass(frozen=True, slots=True)
class RowCurves:
    """The curves of one row: the mean over its runs, and each run by itself where there are several."""

    row: SweepRow
    mean: Points
    runs: tuple[Points, ...] = ()

    @property
    def values(self) -> NDArray[np.float64]:
        """Returns all values that there are."""
        return np.concatenate([it.finite for it in (self.mean, *self.runs)])


def lines_of(sweep: Sweep, read: Read) -> list[RowCurves]:
    """Returns a line for each row with a curve; runs that failed count where none finished."""
    lines = []
    for row in sweep.rows:
        runs = [(it.failed, read(it.measured)) for it in sweep.records if it.row == row.name and it.measured]
        there = [(failed, curve) for failed, curve in runs if curve and curve.steps]
        curves = [curve for failed, curve in there if not failed] or [curve for _, curve in there]
        if curves:
            single = [mean_of([curve]) for curve in curves[:SEEDS_DRAWN]] if len(curves) > 1 else []
            lines.append(RowCurves(row, mean_of(curves), tuple(single)))
    return lines


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


def value_range(lines: Sequence[RowCurves]) -> tuple[float, float] | None:
    """Returns the lowest and the highest value to show; what diverged or is far outside does not count."""
    trusted = [line for line in lines if line.row.verdict not in (Verdict.DIVERGED, Verdict.FAILED)]
    for group in (trusted, lines):
        values = np.concatenate([np.empty(0), *(line.values for line in group)])
        if values.size:
            inner_low, inner_high = np.quantile(values, [0.02, 0.98])
            reach = OUTLIER * (inner_high - inner_low) or np.inf
            return max(values.min(), inner_low - reach), min(values.max(), inner_high + reach)
    return None


def each_step(changes: Curve | None, steps: int) -> Curve | None:
    """Returns what is known where it changed, such as a loss scale, at each step.

    >>> each_step(Curve((1, 3), (8.0, 4.0)), 4).values
    (8.0, 8.0, 4.0, 4.0)
    """
    if not changes or not changes.steps:
        return None
    end = max(steps, changes.steps[-1])
    every = np.unique(np.linspace(1, end, min(end, EACH_STEP)).astype(int))
    last = np.maximum(np.searchsorted(changes.steps, every, side="right") - 1, 0)
    return Curve(tuple(every.tolist()), tuple(np.array(changes.values)[last].tolist()))
