"""Curves that are kept whole while a run goes on, and stay short when it is over: neighbours are averaged."""

from __future__ import annotations

from array import array
from itertools import groupby

from ampatch.sweeps.rows import Curve

LIMIT = 1000


class CurveBuilder:
    """Collects the values of a curve, 16 bytes each."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def add(self, step: int, value: float) -> None:
        """Takes the next value."""
        self._steps.append(step)
        self._values.append(value)

    def build(self) -> Curve:
        """Returns all values."""
        return Curve(tuple(self._steps), tuple(self._values))


def mean_by_step(curve: Curve) -> Curve:
    """Makes one value of several that follow each other in a step.

    >>> mean_by_step(Curve((1, 1, 2), (1.0, 3.0, 5.0)))
    Curve(steps=(1, 2), values=(2.0, 5.0))
    """
    points = groupby(zip(curve.steps, curve.values, strict=True), key=lambda point: point[0])
    values = {step: [value for _, value in group] for step, group in points}
    return Curve(tuple(values), tuple(sum(it) / len(it) for it in values.values()))


def averaged(curve: Curve, limit: int = LIMIT) -> Curve:
    """Returns a curve of at most `limit` points, each the mean of neighbours at the step of the last of them.

    >>> averaged(Curve((1, 2, 3, 4, 5), (10.0, 20.0, 30.0, 40.0, 50.0)), limit=3)
    Curve(steps=(2, 4, 5), values=(15.0, 35.0, 50.0))
    """
    steps, values = curve.steps, curve.values
    width = max(1, -(-len(steps) // limit))
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    ends = [*steps[width - 1 :: width], *(steps[-1:] if len(steps) % width else ())]
    return Curve(tuple(ends), tuple(sum(part) / len(part) for part in parts))


def changes(curve: Curve, limit: int = LIMIT) -> Curve:
    """Returns the first value and each that differs from the one before; of too many, some.

    >>> changes(Curve((1, 2, 3, 4), (8.0, 8.0, 4.0, 4.0)))
    Curve(steps=(1, 3), values=(8.0, 4.0))
    """
    points = list(zip(curve.steps, curve.values, strict=True))
    points = [point for at, point in enumerate(points) if at == 0 or point[1] != points[at - 1][1]]
    width = max(1, -(-(len(points) - 1) // max(1, limit - 1)))
    kept = [*points[:-1:width], *points[-1:]]
    return Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))
