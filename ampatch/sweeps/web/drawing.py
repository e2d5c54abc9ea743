"""Drawings in SVG: a frame with axes, lines in it, and labels that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampatch.sweeps.web.axes import Axis
from ampatch.sweeps.web.lines import Point, Points
from ampatch.sweeps.web.markup import Markup, coordinate, element, join

WIDTH = 344  # of a chart, in CSS pixels on a phone of 360
CHARACTER = 6.9  # of the text in charts, at most on average
MARGIN = 4  # for short texts, which may be wider than the average
LINE = 13  # height of a line of that text


@dataclass(frozen=True, slots=True)
class Plot:
    """The area inside a frame, and its axes."""

    width: float
    height: float
    x: Axis
    y: Axis

    @property
    def top(self) -> float:
        """Returns the upper end of the area."""
        return self.y.end

    @property
    def bottom(self) -> float:
        """Returns the lower end of the area."""
        return self.y.start

    def clip(self, *children: str | None) -> Markup:
        """Returns the children cut off at the frame; an inner drawing needs no id for that."""
        x, y, end = self.x.start, self.top, self.x.end
        size = {"x": x, "y": y, "width": end - x, "height": self.bottom - y}
        box = " ".join(coordinate(value) for value in size.values())
        return element("svg", *children, **size, viewBox=box)


def picture(width: float, height: float, title: str, description: str, *children: str | None) -> Markup:
    """Returns a drawing that a screen reader reads as its title and its description."""
    words = element("title", title), element("desc", description)
    box = f"0 0 {coordinate(width)} {coordinate(height)}"
    return element("svg", *words, *children, viewBox=box, role="img")


def text(x: float, y: float, words: str, *, style: str | None = None, anchor: str | None = None) -> Markup:
    """Returns a line of text; `anchor` is its "end" or its "middle", else its start is at `x`."""
    return element("text", words, x=x, y=y, class_=style, text_anchor=anchor)


def width_of(words: str) -> float:
    """Returns how wide a text is in a chart, or less."""
    return MARGIN + CHARACTER * len(words)


def cut_end(words: str, width: float) -> str:
    """Returns a text cut so that it fits.

    >>> cut_end("O2 keep_batchnorm_fp32=False", 100)
    'O2 keep_batc…'
    """
    most = max(int((width - MARGIN) / CHARACTER), 2)
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def frame(plot: Plot, unit: str = "step", most: int = 5) -> Markup:
    """Returns the grid, the numbers beside the axes, and what the horizontal one counts."""
    parts = []
    for tick in plot.y.ticks(most):
        y = plot.y.place(tick)
        parts.append(element("line", x1=plot.x.start, x2=plot.x.end, y1=y, y2=y, class_="grid"))
        parts.append(text(plot.x.start - 5, y + 4, plot.y.write(tick), anchor="end"))
    parts.append(
        element("line", x1=plot.x.start, x2=plot.x.end, y1=plot.bottom, y2=plot.bottom, class_="axis")
    )
    base = plot.bottom + LINE + 2
    room = plot.x.end + 6 - width_of(unit)
    for tick in plot.x.ticks(max(2, round((plot.x.end - plot.x.start) / 60))):
        words, x = plot.x.write(tick), plot.x.place(tick)
        if x + width_of(words) / 2 < room:
            parts.append(text(x, base, words, anchor="middle"))
    parts.append(text(plot.x.end + 6, base, unit, anchor="end"))
    return join(parts)


def tick_width(axis: Axis, most: int = 5) -> float:
    """Returns how wide the numbers of an axis are."""
    return max((width_of(axis.write(tick)) for tick in axis.ticks(most)), default=0.0)


def pieces(points: Points) -> list[list[tuple[float, float]]]:
    """Returns the unbroken parts of a curve.

    >>> pieces(((1, 2.0), (2, None), (3, 4.0), (4, 5.0)))
    [[(1, 2.0)], [(3, 4.0), (4, 5.0)]]
    """
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is not None:
            found[-1].append((step, value))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def curve(points: Points, plot: Plot, style: str, dashes: str | None = None) -> Markup:
    """Returns a curve with its gaps; a point without neighbours is a dot."""
    drawn, dots = [], []
    for piece in pieces(points):
        places = [f"{coordinate(plot.x.place(x))} {coordinate(plot.y.place(y))}" for x, y in piece]
        if len(piece) > 1:
            drawn.append("M" + "L".join(places))
        else:
            dots.append(dot(piece[0], plot, style))
    path = element("path", d="".join(drawn), class_=style, stroke_dasharray=dashes) if drawn else None
    return join([path, *dots])


def dot(point: tuple[float, float], plot: Plot, style: str) -> Markup:
    """Returns a dot in the colour of a line."""
    x, y = plot.x.place(point[0]), plot.y.place(point[1])
    return element("circle", cx=x, cy=y, r=3, class_=f"{style} dot")


def cross(x: float, y: float, style: str, size: float = 3) -> Markup:
    """Returns a mark in the form of an x."""
    low, high = coordinate(y - size), coordinate(y + size)
    left, right = coordinate(x - size), coordinate(x + size)
    return element("path", d=f"M{left} {low}L{right} {high}M{left} {high}L{right} {low}", class_=style)


def end_of(points: Points) -> tuple[Point, bool] | None:
    """Returns the last point that has a value, and whether the curve breaks off there."""
    for index in range(len(points) - 1, -1, -1):
        if points[index][1] is not None:
            return points[index], index < len(points) - 1
    return None


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns places moved so that neighbours are a gap apart, and between the ends if there is room.

    >>> spread_out([10.0, 11.0, 40.0], 8, 0, 42)
    [10.0, 18.0, 40.0]
    >>> spread_out([40.0, 41.0], 8, 0, 42)
    [34, 42]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [0.0] * len(places)
    last = low - gap
    for index in order:
        moved[index] = last = max(places[index], last + gap)
    limit = high
    for index in reversed(order):
        moved[index] = limit = min(moved[index], limit)
        limit -= gap
    return moved
