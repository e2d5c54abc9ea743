"""The charts of the page: the curves of each level beside those of O0, made of few points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampatch.sweeps.numbers import number, short, typeset
from ampatch.sweeps.rows import BASELINE, Curve, Level, Run, Sweep, Verdict, metric_names

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
    charts = [(name, charts_of_curves(name, level_curves)) for name, level_curves in curves]
    return [(name, group) for name, group in charts if group]


def curves_of(sweep: Sweep, read: Callable[[Run], Curve | None]) -> list[LevelCurve]:
    """Returns the curves of each level with any; runs that failed count where none finished."""
    level_curves = []
    for row in sweep.rows:
        runs = [(run.failed, curve) for run in sweep.records if run.row == row.name and (curve := read(run))]
        with_steps = [(failed, curve) for failed, curve in runs if curve.steps]
        curves = [curve for failed, curve in with_steps if not failed] or [curve for _, curve in with_steps]
        if curves:
            level_curves.append(LevelCurve(row, mean_of(curves)))
    return level_curves


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
    is_shown = np.abs(values) <= LARGEST
    counts, finite = np.bincount(part), np.bincount(part, is_shown)
    means = np.bincount(part, np.where(is_shown, values, 0.0)) / np.maximum(finite, 1)
    enough = (finite > 0) & (2 * finite >= counts)
    return Points(np.bincount(part, steps) / counts, np.where(enough, means, np.nan))


def value_range(curves: Sequence[LevelCurve]) -> tuple[float, float] | None:
    """Returns the lowest and the highest value to show; what diverged or is far outside does not count."""
    trusted = [curve for curve in curves if curve.row.verdict not in (Verdict.DIVERGED, Verdict.FAILED)]
    for group in (trusted, curves):
        values = np.concatenate([np.empty(0), *(curve.mean.finite for curve in group)])
        if values.size:
            inner_low, inner_high = np.quantile(values, [0.02, 0.98])
            reach = OUTLIER * (inner_high - inner_low) or np.inf
            return max(values.min(), inner_low - reach), min(values.max(), inner_high + reach)
    return None


def charts_of_curves(name: str, curves: Sequence[LevelCurve]) -> list[Chart]:
    """Returns a chart for each level but O0, with the mean of O0 behind it; all have the same axes."""
    shown = value_range(curves)
    # There is no chart of what has one value.
    if shown is None or shown[0] == shown[1] or all(curve.mean.steps.size < 2 for curve in curves):
        return []
    end = max(curve.mean.steps[-1] for curve in curves)
    o0 = next((curve for curve in curves if curve.row.name == BASELINE), None)
    return [chart_of(name, curve, o0, shown, end) for curve in curves if curve is not o0 or len(curves) == 1]


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


# ---- Drawings: SVG in the colours of the page, which its style sheet names and changes with the theme ----

WIDTH, HEIGHT = 360, 160  # of a chart, in CSS pixels on a phone of 390
LEFT, RIGHT, FOOT, HEAD = 60, 20, 34, 6  # margins, which hold the numbers
WIDE = 10.0  # a range with a larger ratio gets a logarithmic axis
TICKS = 4  # at the most
INK, MUTED, GRID, O0, ROW, BAD = (f"var(--{name})" for name in ("ink", "muted", "grid", "o0", "row", "bad"))


@dataclass(frozen=True, slots=True)
class Points:
    """Values over steps; NaN where there is none to draw."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        return self.values[np.isfinite(self.values)]

    @property
    def break_off(self) -> Points:
        """Returns the last point with a value if others follow, else none."""
        last = np.flatnonzero(np.isfinite(self.values))[-1:]
        last = last[last < self.values.size - 1]
        return Points(self.steps[last], self.values[last])

    def describe(self) -> str:
        """Says where the curve begins and ends."""
        if not self.finite.size:
            return "no finite value"
        after = [f", no finite value after step {step:,.0f}" for step in self.break_off.steps]
        first, last = (typeset(number(value)) for value in self.finite[[0, -1]])
        return f"from {first} to {last}{''.join(after)}"


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of a row: its title, what it shows in words, and the content of its `svg` element."""

    row: str
    title: str
    words: str
    svg: str


def draw(
    curves: Sequence[tuple[Points, str, float]],
    crosses: Points,
    shown: tuple[float, float],
    steps: tuple[float, float],
) -> str:
    """Returns curves, each with its colour and width, and crosses, as the content of an `svg` element."""
    low, high = shown
    is_log = low > 0 and high / low > WIDE
    scale = np.log10 if is_log else np.asarray
    across = make_axis(*steps, LEFT, WIDTH - RIGHT)
    up = make_axis(float(scale(low)), float(scale(high)), HEIGHT - FOOT - 6, HEAD + 6)
    parts = []
    for value in log_ticks(low, high) if is_log else ticks(low, high):
        y = f"{up(scale(value)):.1f}"
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 6, f"{float(y) + 4:.1f}", typeset(short(value)), "end"))
    for value in (tick for tick in ticks(*steps) if tick == int(tick)):
        parts.append(text(f"{across(value):.1f}", HEIGHT - FOOT + 15, typeset(short(value)), "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 4, "step", "end"))
    parts.append(f'<path d="M{LEFT} {HEIGHT - FOOT}H{WIDTH - RIGHT}" stroke="{MUTED}"/>')
    for points, colour, width in curves:
        xs, ys = across(points.steps), up(scale(np.clip(points.values, low, high)))
        line = "".join(path_of(xs, ys))
        # A round end makes a dot of a point whose neighbours have no value.
        style = f'stroke="{colour}" stroke-width="{width:g}" stroke-linecap="round" fill="none"'
        parts.append(f'<path d="{line}" {style}/>')
    ys = up(scale(np.clip(crosses.values, low, high)))
    marks = [
        f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6" for x, y in zip(across(crosses.steps), ys, strict=True)
    ]
    if marks:
        parts.append(f'<path d="{"".join(marks)}" stroke="{INK}"/>')
    return "\n".join(parts)


def make_axis(first: float, last: float, start: float, end: float) -> Callable[[NDArray], NDArray]:
    return lambda value: start + (value - first) / ((last - first) or 1.0) * (end - start)


def path_of(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> Iterator[str]:
    """Yields a line through the points, with gaps where there is no value."""
    is_on = False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            yield f"{'L' if is_on else 'M'}{x:.1f} {y:.1f}" + ("" if is_on else "h0")
        is_on = math.isfinite(y)


def text(x: object, y: object, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{MUTED}">{words}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers in a range: steps of 1, 2 or 5 times a power of 10.

    >>> ticks(0.0, 9.0), ticks(0.12, 0.31)
    ([0.0, 5.0], [0.15, 0.2, 0.25, 0.3])
    """
    size = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    for step in (size * part for part in (0.1, 0.2, 0.5, 1, 2, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < TICKS:
            return [
                round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)
            ]
    return [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of 10 in a range, some of them where there are many."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1, -(-(last - first + 1) // TICKS) or 1)]
