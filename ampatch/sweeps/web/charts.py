"""The charts of the page: matplotlib draws the curves of each row beside those of O0, as SVG."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from io import StringIO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.sweep import BASELINE, Sweep, Verdict
from ampatch.sweeps.web.curves import Line, Points, each_step, lines_of, value_range
from ampatch.sweeps.web.tables import metric_names

WIDTH, HEIGHT = 360, 160  # of a chart, in CSS pixels on a phone of 390
LEFT, RIGHT, FOOT, HEAD = 50, 20, 34, 6  # margins, which hold the numbers
METRICS_DRAWN = 6  # the others are in sweep.json
WIDE = 10.0  # a range with a larger ratio gets a logarithmic axis
LESS_ACCURATE = (Verdict.WORSE, Verdict.DIVERGED, Verdict.FAILED)
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
class Chart:
    """A drawing of a row: its title, what it shows in words, and the content of its `svg` element."""

    row: str
    title: str
    words: str
    svg: str


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


def curve_charts(name: str, lines: Sequence[Line]) -> list[Chart]:
    """Returns a chart for each row but O0, with the mean of O0 behind it; all have the same axes."""
    shown = value_range(lines)
    # There is no chart of what has one value.
    if shown is None or shown[0] == shown[1] or all(line.mean.steps.size < 2 for line in lines):
        return []
    end = max(it.steps[-1] for line in lines for it in (line.mean, *line.runs))
    baseline = next((line for line in lines if line.row.name == BASELINE), None)
    drawn = [line for line in lines if line is not baseline] or lines
    return [chart_of(name, line, baseline, shown, end) for line in drawn]


def chart_of(name: str, line: Line, baseline: Line | None, shown: tuple[float, float], end: float) -> Chart:
    """Returns the chart of a row's curves, with a cross where no finite value follows."""
    row, words = line.row, line.mean.describe()
    title = f"{name} of {row.name}" + (" beside O0" if baseline not in (None, line) else "")
    colour = O0 if row.name == BASELINE else BAD if row.verdict in LESS_ACCURATE else ROW
    if colour == BAD:
        words = f"{row.verdict}; {words}"

    curves = [(baseline.mean, O0, 5.0)] if baseline else []
    curves += [(run, colour, 0.6) for run in line.runs] + [(line.mean, colour, 1.5)]
    return Chart(row.name, title, words, draw(title, curves, line.mean.break_off, shown, (1, max(end, 2))))


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


# ---- SVG ----


def draw(
    title: str,
    curves: Sequence[tuple[Points, str, float]],
    crosses: Points,
    shown: tuple[float, float],
    steps: tuple[float, float],
) -> str:
    """Returns curves, each with its colour and width, and crosses, as the content of an `svg` element.

    The settings of matplotlib are as they were afterwards, and the user's own have no effect. What is painted
    alike is the same text but for the ids, which the title tells apart.
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
