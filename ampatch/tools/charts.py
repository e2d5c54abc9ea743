"""Draws curves as SVG, in the colours of the page, which its style sheet names and changes with the theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampatch.tools.numbers import number, short, typeset

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
        first, last = (typeset(number(it)) for it in self.finite[[0, -1]])
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
    across = place(*steps, LEFT, WIDTH - RIGHT)
    up = place(float(scale(low)), float(scale(high)), HEIGHT - FOOT - 6, HEAD + 6)
    parts = []
    for value in log_ticks(low, high) if is_log else ticks(low, high):
        y = f"{up(scale(value)):.1f}"
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 6, f"{float(y) + 4:.1f}", typeset(short(value)), "end"))
    for value in (it for it in ticks(*steps) if it == int(it)):
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


def place(first: float, last: float, start: float, end: float) -> Callable[[NDArray], NDArray]:
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
