"""Curves of many runs made into few points that can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeGuard

from ampatch.sweeps.records.record import Curve, Measured, Record

POINTS = 110  # of a curve, at most: one for 2 or 3 units of a chart's width
SEED_POINTS = 70
SEEDS_DRAWN = 8  # the file stays small with a hundred of them
WIDE = 10.0  # a range with a larger ratio gets a logarithmic axis
OUTLIER = 8.0
LARGEST = 1e300  # sums and differences of such numbers are finite

# The value is None where there is none to draw: NaN, infinite.
Point = tuple[float, float | None]
Points = tuple[Point, ...]
Read = Callable[[Measured], Curve | None]


@dataclass(frozen=True, slots=True)
class Line:
    """The curves of one row: the mean over its runs, and each run by itself where there are several."""

    row: str
    mean: Points
    runs: tuple[Points, ...] = ()


def lines_of(rows: Iterable[str], records: Sequence[Record], read: Read) -> tuple[Line, ...]:
    """Returns a line for each row with a curve; runs that failed count where none finished."""
    lines = []
    for row in rows:
        curves = curves_of(row, records, read)
        if curves:
            lines.append(make_line(row, curves))
    return tuple(lines)


def curves_of(row: str, records: Sequence[Record], read: Read) -> list[Curve]:
    """Returns the curves of the runs of a row."""
    found = []
    for record in records:
        curve = read(record.measured) if record.row == row and record.measured else None
        if curve and curve.steps:
            found.append((record.failed, curve))
    finished = [curve for failed, curve in found if not failed]
    return finished or [curve for _, curve in found]


def make_line(row: str, curves: Sequence[Curve]) -> Line:
    """Returns the mean of curves, which may have other steps each, and the curves thinned."""
    end = max(curve.steps[-1] for curve in curves)
    dense = max(len(curve.steps) for curve in curves) > POINTS
    mean = mean_of([buckets(curve, POINTS if dense else None, end) for curve in curves])
    if len(curves) == 1:
        return Line(row, mean)
    dense = max(len(curve.steps) for curve in curves) > SEED_POINTS
    runs = [mean_of([buckets(curve, SEED_POINTS if dense else None, end)]) for curve in curves[:SEEDS_DRAWN]]
    return Line(row, mean, tuple(runs))


def buckets(curve: Curve, count: int | None, end: int) -> dict[int, Point]:
    """Returns the mean step and the mean value of each bucket of steps; without a count each step is one.

    A bucket most of whose values are not finite has none.

    >>> buckets(Curve((1, 2, 3, 4), (5.0, 7.0, float("nan"), float("nan"))), 2, 4)
    {0: (1.5, 6.0), 1: (3.5, None)}
    """
    found: dict[int, list[tuple[int, float]]] = {}
    for step, value in zip(curve.steps, curve.values, strict=True):
        key = step if count is None else min((step - 1) * count // max(end, 1), count - 1)
        found.setdefault(key, []).append((step, value))
    return {key: middle([step for step, _ in it], [value for _, value in it]) for key, it in found.items()}


def is_drawable(value: float | None) -> TypeGuard[float]:
    """Says whether there is a value, and it is finite."""
    return value is not None and abs(value) <= LARGEST


def middle(steps: Sequence[float], values: Sequence[float | None]) -> Point:
    """Returns the mean of the steps and of the finite values, None if those are fewer than half."""
    finite = [value for value in values if is_drawable(value)]
    return fmean(steps), fmean(finite) if 2 * len(finite) >= len(values) and finite else None


def mean_of(curves: Sequence[dict[int, Point]]) -> Points:
    """Returns the mean over curves of each bucket that any of them has."""
    keys = sorted({key for curve in curves for key in curve})
    present = ([curve[key] for curve in curves if key in curve] for key in keys)
    return tuple(middle([step for step, _ in it], [value for _, value in it]) for it in present)


def values_of(lines: Iterable[Line]) -> list[float]:
    """Returns the values that lines have, those of single runs as well as the means."""
    curves = [points for line in lines for points in (line.mean, *line.runs)]
    return [value for points in curves for _, value in points if value is not None]


def value_range(lines: Sequence[Line], trusted: Callable[[str], bool]) -> tuple[float, float] | None:
    """Returns the lowest and the highest value to show; what diverged or is far outside does not count.

    >>> steady = Line("O0", tuple((step, 1.0 + step / 100) for step in range(101)))
    >>> value_range([steady, Line("O3", ((0, 1e30),))], lambda row: row == "O0")
    (1.0, 2.0)
    """
    values = sorted(values_of([line for line in lines if trusted(line.row)]) or values_of(lines))
    if not values:
        return None
    low, high = values[0], values[-1]
    inner_low, inner_high = (values[round((len(values) - 1) * part)] for part in (0.02, 0.98))
    reach = OUTLIER * (inner_high - inner_low)
    if reach > 0:
        low, high = max(low, inner_low - reach), min(high, inner_high + reach)
    return low, high


def is_wide(low: float, high: float) -> bool:
    """Says whether a range is better shown on a logarithmic axis."""
    return low > 0 and high / low > WIDE


def later(line: Line, start: float) -> Line:
    """Returns a line without what comes before a step."""

    def part(points: Points) -> Points:
        return tuple(point for point in points if point[0] >= start)

    return Line(line.row, part(line.mean), tuple(map(part, line.runs)))
