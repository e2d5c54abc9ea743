"""The figures of losses, metrics and loss scales: curves, and last values, with a caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.record import Curve, Measured
from ampatch.sweeps.records.sweep import BASELINE, Distance, Row, Sweep, Verdict
from ampatch.sweeps.web.bars import Band, Strip, strip_chart
from ampatch.sweeps.web.chart import History, Range, line_chart, panel, scale_chart
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.drawing import end_of, pieces
from ampatch.sweeps.web.figures import Looks, figure
from ampatch.sweeps.web.lines import SEEDS_DRAWN, Line, Read, is_drawable, later, lines_of, value_range
from ampatch.sweeps.web.markup import Markup, breakable, element
from ampatch.sweeps.web.tables import name_of

LOST = (Verdict.DIVERGED, Verdict.FAILED)
RUNS_ON_A_STRIP = 50
STEPS_IN_A_PANEL = 20


def legend(names: Sequence[str], looks: Looks) -> Markup:
    """Returns how the line of each row looks."""
    return element("ul", *(legend_item(looks[name]) for name in names), class_="legend")


def legend_item(look: Look) -> Markup:
    """Returns the line of a row, its key and its name."""
    line = element("line", x1=1, x2=29, y1=9, y2=9, class_=f"{look.style} mean", stroke_dasharray=look.dashes)
    swatch = element("svg", line, viewBox="0 0 30 18", aria_hidden="true")
    name = None if look.key == look.name else breakable(f" {look.name}")
    return element("li", swatch, element("span", element("b", look.key), name))


def curve_lines(sweep: Sweep, read: Read) -> tuple[Line, ...]:
    """Returns the curves of all rows."""
    return lines_of([row.name for row in sweep.rows], sweep.records, read)


def curves_figure(sweep: Sweep, lines: Sequence[Line], looks: Looks, name: str) -> Markup | None:
    """Returns a chart with the curves of all rows."""
    shown = shown_range(sweep, lines)
    if shown is None:
        return None
    drawing = line_chart(f"{name} over the steps", lines, looks, shown)
    return figure(drawing, name, curve_note(lines, shown))


def curve_note(lines: Sequence[Line], shown: Range) -> str:
    """Returns what the lines of a chart are."""
    notes = [
        "mean over the seeds; single seeds are faint" if any(line.runs for line in lines) else "one seed"
    ]
    if shown.kind != "linear":
        notes.append("logarithmic")
    ends = [end for line in lines if (end := end_of(line.mean))]
    if any(breaks_off for _, breaks_off in ends):
        notes.append(f"a {TYPESET.times} is where no finite value follows")
    if any(has_gap(line) for line in lines):
        notes.append("a gap is where values are not finite")
    return "; ".join(notes)


def has_gap(line: Line) -> bool:
    """Says whether there are values before and after some that are not finite."""
    return len(pieces(line.mean)) > 1


def shown_range(sweep: Sweep, lines: Sequence[Line]) -> Range | None:
    """Returns what to show of curves; None where they have no finite value."""
    lost = lost_rows(sweep)
    span = value_range(lines, lambda row: row not in lost)
    if span is None:
        return None
    end = max(points[-1][0] for line in lines for points in (line.mean, *line.runs) if points)
    return Range(math.ceil(end), *span)


def lost_rows(sweep: Sweep) -> set[str]:
    """Returns the rows whose values do not matter for what a chart shows."""
    return {row.name for row in sweep.rows if row.verdict in LOST}


def panel_figures(sweep: Sweep, lines: Sequence[Line], looks: Looks) -> list[Markup]:
    """Returns a small chart for each row but O0, all with the same axes: the steps after the first quarter.

    Before, losses fall so far that rows cannot be told apart on the same axes.
    """
    baseline = next((line for line in lines if line.row == BASELINE), None)
    if baseline is None or len(lines) < 3 or len(baseline.mean) < STEPS_IN_A_PANEL:
        return []
    start = int(baseline.mean[-1][0] / 4)
    rest = [later(line, start) for line in lines]
    shown = shown_range(sweep, rest)
    if shown is None:
        return []
    shown = replace(shown, start=start)
    behind = later(baseline, start)
    return [
        figure(panel(line, behind, looks, shown), name_of(looks[line.row]))
        for line in rest
        if line.row != BASELINE
    ]


# ---- Last values ----


def strip_figure(
    sweep: Sweep,
    looks: Looks,
    name: str,
    read: Callable[[Measured], float | None],
    distance: Callable[[Row], Distance | None],
) -> Markup | None:
    """Returns the last values of each run, beside what counts as the same as O0."""
    strips = []
    lost = lost_rows(sweep)
    for row in sweep.rows:
        own = [it.measured for it in sweep.records if it.row == row.name and it.measured and not it.failed]
        values = tuple(value for it in own if is_drawable(value := read(it)))
        if values:
            strips.append(Strip(looks[row.name], values[:RUNS_ON_A_STRIP], row.name not in lost))
    if len(strips) < 2:
        return None
    band = band_of([distance(row) for row in sweep.rows], sweep.settings.tolerance)
    shaded = f"; shaded: mean of O0 ± {TYPESET.short(sweep.settings.tolerance)} spreads" if band else ""
    said = (f"{it.look.name}: {', '.join(TYPESET.number(value, 4) for value in it.values)}" for it in strips)
    drawing = strip_chart(f"{name} of each run", strips, band, "; ".join(said) + ".")
    return figure(drawing, name, f"one dot a run{shaded}")


def band_of(distances: Sequence[Distance | None], tolerance: float) -> Band | None:
    """Returns what counts as the same as O0; None where there is no O0, or no spread."""
    for it in distances:
        if it and is_drawable(it.baseline) and it.spread and is_drawable(tolerance * it.spread):
            return Band(it.baseline, tolerance * it.spread)
    return None


# ---- Loss scales ----


def histories_of(row: str, scaler: str, sweep: Sweep) -> list[History]:
    """Returns the history of a row's loss scale in each of its runs."""
    found = []
    for record in sweep.records:
        it = record.measured
        curve = it.loss_scales.get(scaler) if it and record.row == row else None
        changes = [(step, value) for step, value in pairs(curve) if 0 < value < math.inf]
        if it and changes:
            steps, values = zip(*changes, strict=True)
            found.append(History(Curve(steps, values), max(it.steps, steps[-1]), it.skipped))
    return found


def pairs(curve: Curve | None) -> Iterator[tuple[int, float]]:
    """Yields the steps and values of a curve."""
    if curve:
        yield from zip(curve.steps, curve.values, strict=True)


def scale_figures(sweep: Sweep, looks: Looks) -> list[Markup]:
    """Returns a figure for each row and scaler whose loss scale changed."""
    figures = []
    for row, scaler in scalers_of(sweep):
        histories = histories_of(row, scaler, sweep)
        if not is_constant(histories):
            name = row if number_of_scalers(row, sweep) == 1 else f"{row}, scaler {scaler}"
            skipped = sum(len(history.skipped) for history in histories)
            note = f"{TYPESET.plural(len(histories), 'run')}; {TYPESET.plural(skipped, 'step')} skipped"
            drawing = scale_chart(f"Loss scale of {name}", looks[row], histories[:SEEDS_DRAWN])
            figures.append(figure(drawing, name, note))
    return figures


def scalers_of(sweep: Sweep) -> list[tuple[str, str]]:
    """Returns each row with each of its scalers."""
    found = {}
    for record in sweep.records:
        for scaler in record.measured.loss_scales if record.measured else ():
            if histories_of(record.row, scaler, sweep):
                found[record.row, scaler] = None
    order = {row.name: index for index, row in enumerate(sweep.rows)}
    return sorted((key for key in found if key[0] in order), key=lambda key: (order[key[0]], key[1]))


def number_of_scalers(row: str, sweep: Sweep) -> int:
    """Returns how many scalers a row has."""
    return sum(name == row for name, _ in scalers_of(sweep))


def is_constant(histories: Sequence[History]) -> bool:
    """Says whether a loss scale stayed what it was in all runs."""
    return len({value for history in histories for value in history.changes.values}) == 1


def constant_scales(sweep: Sweep) -> list[str]:
    """Returns a sentence for each loss scale that rows kept from the first step to the last."""
    rows: dict[tuple[float, bool], list[str]] = {}
    for row, scaler in scalers_of(sweep):
        histories = histories_of(row, scaler, sweep)
        if is_constant(histories):
            skipped = any(history.skipped for history in histories)
            names = rows.setdefault((histories[0].changes.values[0], skipped), [])
            names += [row] if row not in names else []
    return [constant_sentence(value, skipped, names) for (value, skipped), names in rows.items()]


def constant_sentence(value: float, skipped: bool, names: Sequence[str]) -> str:
    """Returns what is to be said of a loss scale that did not change.

    >>> constant_sentence(128.0, False, ["O2", "O5"])
    'O2, O5: 128 from the first step to the last, and no step was skipped.'
    """
    after = "and steps were skipped all the same" if skipped else "and no step was skipped"
    return f"{', '.join(names)}: {TYPESET.scale(value)} from the first step to the last, {after}."
