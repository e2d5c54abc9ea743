"""Draws curves as SVG, in the colours of the page: matplotlib does, with none of its settings changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from ampatch.tools.numbers import TYPESET

WIDTH, HEIGHT = 360, 160  # of a chart, in CSS pixels on a phone of 390
LEFT, RIGHT, FOOT, HEAD = 50, 20, 34, 6  # margins, which hold the numbers
WIDE = 10.0  # a range with a larger ratio gets a logarithmic axis
# In the page each of these colours becomes the variable of the style sheet that has its name.
VARIABLES = ("ink", "muted", "grid", "o0", "row", "bad")
INK, MUTED, GRID, O0, ROW, BAD = (f"#{index}badc0" for index in range(len(VARIABLES)))
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11.5,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "xtick.bottom": False,
    "ytick.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Points:
    """Values over steps; NaN where there is none to draw."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def finite(self) -> NDArray[np.float64]:
        """Returns the values that there are."""
        return self.values[np.isfinite(self.values)]

    @property
    def lonely(self) -> Points:
        """Returns the points whose neighbours have no values: no line goes through them."""
        there = np.isfinite(np.pad(self.values, 1, constant_values=np.nan))
        return self.only(np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:]))

    @property
    def break_off(self) -> Points:
        """Returns the last point with a value if others follow, else none."""
        last = np.flatnonzero(np.isfinite(self.values))[-1:]
        return self.only(last[last < self.values.size - 1])

    def only(self, places: NDArray[np.int64]) -> Points:
        """Returns the points at these places."""
        return Points(self.steps[places], self.values[places])

    def describe(self) -> str:
        """Says where the curve begins and ends."""
        if not self.finite.size:
            return "no finite value"
        after = [f", no finite value after step {step:,.0f}" for step in self.break_off.steps]
        return f"from {TYPESET.number(self.finite[0])} to {TYPESET.number(self.finite[-1])}{''.join(after)}"


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of a row: its title, what it shows in words, and the content of its `svg` element."""

    row: str
    title: str
    words: str
    svg: str


def set_values(axes: Axes, low: float, high: float) -> None:
    """Shows these values, on a logarithmic axis where they are positive and far apart."""
    room = 0.05 * (high - low)
    locator = MaxNLocator(4, steps=[1, 2, 5, 10])
    if low > 0 and high / low > WIDE:
        axes.set_yscale("log")
        low, high, room = low * (low / high) ** 0.05, high * (high / low) ** 0.05, 0.0
        locator = LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=4)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low - room, high + room)
    set_ticks(axes.yaxis, locator)


def set_ticks(axis: Axis, locator: MaxNLocator | LogLocator) -> None:
    """Writes our numbers beside an axis."""
    axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, place: TYPESET.short(value))


def draw(
    title: str,
    curves: Sequence[tuple[Points, str, float]],
    crosses: Points,
    shown: tuple[float, float],
    steps: tuple[float, float],
) -> str:
    """Returns curves, each with its colour and width, and crosses, as the content of an `svg` element.

    The user's settings of matplotlib have no effect, and are as they were afterwards. The same curves make
    the same text but for the ids, which the title tells apart.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": ascii(title)})
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        size = (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - FOOT - HEAD) / HEIGHT
        axes = figure.add_axes((LEFT / WIDTH, FOOT / HEIGHT, *size))
        for points, colour, width in curves:
            axes.plot(points.steps, points.values, color=colour, linewidth=width)
            axes.plot(points.lonely.steps, points.lonely.values, ".", color=colour)
        axes.plot(crosses.steps, np.clip(crosses.values, *shown), "x", color=INK, clip_on=False)
        set_values(axes, *shown)
        axes.set_xlim(*steps)
        axes.set_xlabel("step", loc="right", labelpad=1)
        set_ticks(axes.xaxis, MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
        file = StringIO()
        without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(file, metadata=without)
    return for_page(file.getvalue())


def for_page(svg: str) -> str:
    """Returns the content of an SVG in the colours of the page, without what the page has itself."""
    svg = svg[svg.index("</defs>") + len("</defs>") : svg.rindex("</svg>")]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids of groups are the same in each drawing
    svg = re.sub(r"font[a-z-]*: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub("#([0-5])badc0", lambda colour: f"var(--{VARIABLES[int(colour[1])]})", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)
