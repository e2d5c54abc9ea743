"""Charts of curves over the steps: all rows in one, one row beside O0, and the history of a loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.record import Curve
from ampatch.sweeps.web.axes import Axis, Kind, axis_over
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.drawing import (
    LINE,
    WIDTH,
    Plot,
    cross,
    curve,
    end_of,
    frame,
    picture,
    spread_out,
    text,
    tick_width,
    width_of,
)
from ampatch.sweeps.web.lines import Line, is_wide
from ampatch.sweeps.web.markup import Markup, coordinate, element, join

HEIGHT = 220
PANEL_WIDTH, PANEL_HEIGHT = 168, 120
SCALE_HEIGHT = 150
DRAWN_CHANGES = 240  # of a loss scale, at most


@dataclass(frozen=True, slots=True)
class Range:
    """What a chart shows: steps from the first to an end, and values from low to high."""

    end: int
    low: float
    high: float
    start: int = 1

    @property
    def kind(self) -> Kind:
        """Returns the kind of axis for the values."""
        return Kind.LOG if is_wide(self.low, self.high) else Kind.LINEAR


@dataclass(frozen=True, slots=True)
class History:
    """The loss scale of one run: where it changed, the steps it lasted, and which of them were skipped."""

    changes: Curve
    steps: int
    skipped: tuple[int, ...]


def plot_over(shown: Range, width: float, height: float, right: float, most: int = 5) -> Plot:
    """Returns an empty plot with so much room at the right."""
    y = axis_over(shown.low, shown.high, height - LINE - 8, 8, shown.kind)
    return Plot(width, height, x_axis(shown.start, shown.end, tick_width(y, most) + 8, width - right), y)


def x_axis(start: int, end: int, left: float, right: float) -> Axis:
    """Returns the axis of the steps, which has a length even for one step."""
    return Axis(start, end, left, right) if end > start else Axis(start - 1, start + 1, left, right)


def line_chart(title: str, lines: Sequence[Line], looks: Mapping[str, Look], shown: Range) -> Markup:
    """Returns a chart of all rows, each with its key at the end of its line."""
    keys = max(width_of(looks[line.row].key) for line in lines)
    height = max(HEIGHT, 2 * LINE + len(lines) * LINE)
    plot = plot_over(shown, WIDTH, height, keys + 16)
    faint = [curve(run, plot, f"{looks[line.row].style} run") for line in lines for run in line.runs]
    means = [mean_curve(line, plot, looks[line.row]) for line in lines]
    inside = plot.clip(*faint, *means)
    return picture(
        WIDTH, height, title, said_of_lines(lines, looks), frame(plot), inside, end_labels(lines, looks, plot)
    )


def mean_curve(line: Line, plot: Plot, look: Look) -> Markup:
    """Returns the mean of a row, with a cross where it breaks off."""
    parts = [curve(line.mean, plot, f"{look.style} mean", look.dashes)]
    end = end_of(line.mean)
    if end and end[1]:
        parts.append(cross(plot.x.place(end[0][0]), inside(plot, end[0][1]), f"{look.style} mark"))
    return element("g", element("title", look.name), *parts)


def inside(plot: Plot, value: float | None) -> float:
    """Returns the height of a value, or of the edge beyond which it is."""
    return min(max(plot.y.place(value or 0.0), plot.top + 4), plot.bottom - 4)


def end_labels(lines: Sequence[Line], looks: Mapping[str, Look], plot: Plot) -> Markup:
    """Returns the keys of rows beside the ends of their lines, and thin lines from there to here."""
    ends = [(looks[line.row], end) for line in lines if (end := end_of(line.mean))]
    places = [inside(plot, point[1]) for _, (point, _) in ends]
    moved = spread_out(places, LINE, plot.top + 4, plot.bottom - 2)
    parts = []
    for (look, (point, breaks)), y, label in zip(ends, places, moved, strict=True):
        x, edge = plot.x.place(point[0]), plot.x.end
        if not breaks or edge - x < 40:
            corners = (x + 2, y), (edge + 11, label)
            path = "M" + "L".join(f"{coordinate(a)} {coordinate(b)}" for a, b in corners)
            parts.append(element("path", d=path, class_=f"{look.style} leader"))
            parts.append(text(edge + 14, label + 4, look.key, style=f"{look.style} key"))
        else:
            parts.append(text(x + 6, y + 4, look.key, style=f"{look.style} key"))
    return join(parts)


def said_of_lines(lines: Sequence[Line], looks: Mapping[str, Look]) -> str:
    """Returns in words where each line begins and ends."""
    said = []
    for line in lines:
        values = [value for _, value in line.mean if value is not None]
        end = end_of(line.mean)
        if not values or end is None:
            said.append(f"{looks[line.row].name}: no finite value")
            continue
        breaks = f", and breaks off at step {end[0][0]:,.0f}" if end[1] else ""
        first, last = TYPESET.number(values[0]), TYPESET.number(values[-1])
        said.append(f"{looks[line.row].name}: from {first} to {last}{breaks}")
    return "; ".join(said) + "."


def panel(line: Line, baseline: Line | None, looks: Mapping[str, Look], shown: Range) -> Markup:
    """Returns a small chart of one row, with the mean of O0 behind it."""
    look = looks[line.row]
    plot = plot_over(shown, PANEL_WIDTH, PANEL_HEIGHT, 6, 3)
    behind = baseline and curve(baseline.mean, plot, "k0 behind")
    runs = [curve(run, plot, f"{look.style} run") for run in line.runs]
    drawn = plot.clip(behind, *runs, mean_curve(line, plot, look))
    gone = None if end_of(line.mean) else text(plot.x.start + 6, plot.top + LINE, "no finite value")
    beside = " beside O0" if baseline else ""
    title = f"{look.name}{beside}"
    return picture(
        PANEL_WIDTH, PANEL_HEIGHT, title, said_of_lines([line], looks), frame(plot, "", 3), drawn, gone
    )


# ---- Loss scales ----


def scale_chart(title: str, look: Look, histories: Sequence[History]) -> Markup:
    """Returns the loss scale of each run of a row in steps, with a cross at each skipped step."""
    values = [value for history in histories for value in history.changes.values]
    y = axis_over(min(values), max(values), SCALE_HEIGHT - LINE - 8, 8, Kind.LOG2)
    end = max(history.steps for history in histories)
    plot = Plot(WIDTH, SCALE_HEIGHT, x_axis(1, end, tick_width(y, 4) + 8, WIDTH - 8), y)
    drawn = [stairs(history, plot, f"{look.style} scale") for history in histories]
    marks = [skip_marks(history, plot) for history in histories]
    skipped = sum(len(history.skipped) for history in histories)
    low, high = TYPESET.scale(min(values)), TYPESET.scale(max(values))
    words = f"Between {low} and {high}; {TYPESET.plural(skipped, 'step')} skipped."
    return picture(WIDTH, SCALE_HEIGHT, title, words, frame(plot, most=4), *drawn, *marks)


def stairs(history: History, plot: Plot, style: str) -> Markup:
    """Returns a loss scale, which stays as it is from one change to the next."""
    changes = list(zip(history.changes.steps, history.changes.values, strict=True))
    stride = -(-len(changes) // DRAWN_CHANGES)
    changes = changes[:: max(stride, 1)]
    places = [(plot.x.place(step), plot.y.place(value)) for step, value in changes]
    path = f"M{coordinate(places[0][0])} {coordinate(places[0][1])}"
    path += "".join(f"H{coordinate(x)}V{coordinate(y)}" for x, y in places[1:])
    return element("path", d=f"{path}H{coordinate(plot.x.place(history.steps))}", class_=style)


def skip_marks(history: History, plot: Plot) -> Markup:
    """Returns a cross on the line at each skipped step; of those at one place only one is drawn."""
    seen = {}
    for step in history.skipped:
        x, y = plot.x.place(step), plot.y.place(scale_at(history.changes, step))
        seen[round(x), round(y)] = cross(x, y, "skip")
    return join(seen.values())


def scale_at(changes: Curve, step: int) -> float:
    """Returns the loss scale at a step: what the last change before it made.

    >>> scale_at(Curve((1, 5), (8.0, 4.0)), 4), scale_at(Curve((1, 5), (8.0, 4.0)), 5)
    (8.0, 4.0)
    """
    before = [value for at, value in zip(changes.steps, changes.values, strict=True) if at <= step]
    return before[-1] if before else changes.values[0]
