"""Curves that stay short, however long a run is: when there are too many points, neighbours are averaged."""

from __future__ import annotations

from array import array

from ampatch.sweeps.records.record import Curve

LIMIT = 1000


class CurveBuilder:
    """Builds a curve of at most `limit` points out of values that come step by step.

    >>> builder = CurveBuilder(limit=2)
    >>> for step in (1, 2, 3, 4):
    ...     builder.add(step, 10.0 * step)
    >>> builder.build()
    Curve(steps=(2, 4), values=(15.0, 35.0))
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._steps = array("q")
        self._values = array("d")
        self._width = 1  # values that make a point
        self._sum = 0.0
        self._count = 0
        self._last = 0
        self._last_value = 0.0

    def add(self, step: int, value: float) -> None:
        """Takes the next value."""
        self._last, self._last_value = step, value
        self._sum += value
        self._count += 1
        if self._count == self._width:
            self._close()
            if len(self._steps) > self._limit:
                self._merge()

    def build(self) -> Curve:
        """Returns the curve as it is now; the last point may be of fewer values."""
        if self._count:
            self._close()
        return Curve(tuple(self._steps), tuple(self._values))

    def build_with_last(self) -> Curve:
        """Returns the curve with the last value as its last point, in the place of a mean."""
        curve = self.build()
        return Curve(curve.steps, (*curve.values[:-1], self._last_value)) if curve.steps else curve

    def _close(self) -> None:
        self._steps.append(self._last)
        self._values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0

    def _merge(self) -> None:
        """Averages the points two by two; an odd last one goes on being collected."""
        steps, values, width = self._steps, self._values, self._width
        if len(steps) % 2:
            self._sum, self._count = values.pop() * width, width
            steps.pop()
        pairs = zip(values[::2], values[1::2], strict=True)
        self._values = array("d", [(first + second) / 2 for first, second in pairs])
        self._steps = steps[1::2]
        self._width = 2 * width


class ChangeBuilder:
    """Builds the curve of a value that changes seldom: its first value, and each that is another.

    Past `limit` changes, every second of those between is left out.

    >>> builder = ChangeBuilder()
    >>> for step, value in enumerate((8.0, 8.0, 4.0, 4.0)):
    ...     builder.add(step, value)
    >>> builder.build()
    Curve(steps=(0, 2), values=(8.0, 4.0))
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._points: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Takes the next value."""
        if self._points and self._points[-1][1] == value:
            return
        self._points.append((step, value))
        if len(self._points) > self._limit:
            del self._points[1:-1:2]

    def build(self) -> Curve:
        """Returns the curve as it is now."""
        return Curve(tuple(step for step, _ in self._points), tuple(value for _, value in self._points))
