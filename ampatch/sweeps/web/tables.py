"""The tables of the page, which are cards where it is narrow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.sweep import Distance, Row, Sweep, Verdict
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.markup import JOINTS, Markup, breakable, element
from ampatch.sweeps.web.style import COLUMN, NARROW_COLUMN, table_class

METRICS_BESIDE = 3  # that stand in the main table; more get tables of their own
METRICS_A_TABLE = 6
WIDEST_WORD = 11  # characters of a heading that are not broken
VERDICTS = {Verdict.UNKNOWN: "not compared"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and what stands under it for a row.

    `wide` says that it takes the whole width of a card, `is_name` that the heading is a name from a script,
    which may be long.
    """

    heading: str
    read: Callable[[Row], Markup]
    wide: bool = False
    is_name: bool = False


def table_of(
    sweep: Sweep,
    looks: Mapping[str, Look],
    columns: Sequence[Column],
    caption: str,
    *,
    rows: Sequence[Row] | None = None,
    width: int = COLUMN,
) -> Markup:
    """Returns a table with a line for each row of the sweep, or for those given; a column needs a width."""
    heads = [element("th", "Level", class_="left", scope="col", role="columnheader")]
    for column in columns:
        style = "left" if column.wide else None
        words = name_heading(column.heading) if column.is_name else column.heading
        heads.append(element("th", words, class_=style, scope="col", role="columnheader"))
    best = sweep.recommendation.row
    lines = [line_of(row, looks[row.name], columns, row.name == best) for row in rows or sweep.rows]
    # Cards are no table for the browser: the roles say that they still are one.
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads, role="row"), role="rowgroup"),
        element("tbody", *lines, role="rowgroup"),
        class_=table_class(len(columns), width),
        role="table",
    )


def name_heading(name: str) -> Markup:
    """Returns a heading as wide as its longest part, up to a limit, so that words are seldom broken."""
    longest = max(len(part) for part in JOINTS.split(name) or [""])
    return element("span", breakable(name), class_="long", style=f"min-width:{min(longest, WIDEST_WORD)}ch")


def line_of(row: Row, look: Look, columns: Sequence[Column], is_best: bool) -> Markup:
    """Returns the line of a row."""
    cells = [cell_of(column, row) for column in columns]
    name = element("th", name_of(look, is_best), scope="row", role="rowheader")
    return element("tr", name, *cells, class_="best" if is_best else None, role="row")


def cell_of(column: Column, row: Row) -> Markup:
    """Returns what a column says of a row."""
    content = column.read(row)
    style = "wide left" if column.wide else "none" if content == cell(TYPESET.nothing) else None
    return element("td", content, class_=style, data_label=column.heading, role="cell")


def name_of(look: Look, is_best: bool = False) -> Markup:
    """Returns the name of a row, with its key where charts call it by that."""
    key = element("span", look.key, class_="tag") if look.key != look.name else None
    best = element("small", "recommended") if is_best else None
    return element("span", key, element("span", breakable(look.name), class_="name"), best)


def cell(value: str, below: str | None = None) -> Markup:
    """Returns a number, and in small letters what belongs to it."""
    small = element("small", below) if below else None
    return element("span", element("span", value, class_="whole"), small)


def results_table(sweep: Sweep, looks: Mapping[str, Look]) -> Markup:
    """Returns the table that people decide by."""
    metrics = metric_names(sweep.rows)
    beside = metrics if len(metrics) <= METRICS_BESIDE else []
    columns = [
        Column("Verdict", verdict_cell, wide=True),
        Column("ms a step", step_cell),
        Column("Speed", lambda row: cell(TYPESET.ratio(row.speed))),
        Column("Peak memory", memory_cell),
        Column("Final loss", lambda row: distance_cell(row.loss, 4)),
        *map(metric_column, beside),
        Column("Loss scale", scale_cell),
        Column("Runs", runs_cell),
    ]
    caption = (
        "Under the time of a step stand its quartiles, under a loss or metric how much better (+) or worse "
        "than that of O0 it is."
    )
    return table_of(sweep, looks, columns, caption)


def metric_tables(sweep: Sweep, looks: Mapping[str, Look]) -> list[Markup]:
    """Returns tables of the metrics where those are too many for the table of results."""
    names = metric_names(sweep.rows)
    if len(names) <= METRICS_BESIDE:
        return []
    starts = range(0, len(names), METRICS_A_TABLE)
    groups = [names[start : start + METRICS_A_TABLE] for start in starts]
    caption = "Metrics, and how much better (+) or worse than those of O0 they are."
    return [table_of(sweep, looks, [metric_column(name) for name in group], caption) for group in groups]


def time_table(sweep: Sweep, looks: Mapping[str, Look]) -> Markup:
    """Returns the table of what a step's time goes into."""
    columns = [
        Column("Steps a second", lambda row: cell(TYPESET.number(row.steps_per_second))),
        Column("Samples a second", lambda row: cell(TYPESET.number(row.samples_per_second))),
        Column("Forward, ms", lambda row: cell(TYPESET.number(row.forward_ms))),
        Column("Backward, ms", lambda row: cell(TYPESET.number(row.backward_ms))),
        Column("Update, ms", lambda row: cell(TYPESET.number(row.update_ms))),
        Column("Speed vs fastest", lambda row: cell(TYPESET.ratio(row.speed_to_fastest))),
    ]
    timed = [row for row in sweep.rows if row.step_ms]
    caption = "Medians over the runs that finished."
    return table_of(sweep, looks, columns, caption, rows=timed, width=NARROW_COLUMN)


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of all metrics, in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


def metric_column(name: str) -> Column:
    """Returns the column of a metric."""
    return Column(name, lambda row: distance_cell(row.metrics.get(name), 4), is_name=True)


# ---- Cells ----


def verdict_cell(row: Row) -> Markup:
    """Returns what is said of a row's accuracy, and why."""
    words = VERDICTS.get(row.verdict, row.verdict.value)
    style = f"verdict {row.verdict.name.lower()}"
    reason = element("small", row.reason, class_="reason") if row.reason else None
    return element("span", element("span", words, class_=style), reason)


def step_cell(row: Row) -> Markup:
    """Returns the median and the quartiles of a step's time; a single time has none."""
    it = row.step_ms
    if it is None:
        return cell(TYPESET.nothing)
    quartiles = f"{TYPESET.number(it.low)}–{TYPESET.number(it.high)}"  # noqa: RUF001
    return cell(TYPESET.number(it.median), quartiles if it.count > 1 else None)


def memory_cell(row: Row) -> Markup:
    """Returns the peak memory in MiB, and its ratio to that of O0."""
    if row.peak_mib is None:
        return cell(TYPESET.nothing)
    below = f"{TYPESET.ratio(row.memory)} O0" if row.memory is not None else None
    return cell(f"{TYPESET.number(row.peak_mib)} MiB", below)


def distance_cell(distance: Distance | None, digits: int) -> Markup:
    """Returns a loss or metric, and how far it is from that of O0."""
    if distance is None or distance.value is None:
        return cell(TYPESET.nothing)
    return cell(TYPESET.number(distance.value, digits), distance_text(distance))


def distance_text(distance: Distance) -> str | None:
    """Returns how far a value is from that of O0, in words; None for O0 itself."""
    if distance.spreads is None:
        return None
    if distance.unit != "percent":
        return f"{TYPESET.signed(distance.spreads)} spreads"
    # A spread of percents is a part of O0's value.
    if not distance.baseline or distance.spread is None:
        return f"{TYPESET.signed(distance.spreads)} units"
    percent = 100 * distance.spreads * (distance.spread / abs(distance.baseline))
    return f"{TYPESET.signed(percent)} %" if math.isfinite(percent) else None


def scale_cell(row: Row) -> Markup:
    """Returns the last loss scale, and how many steps an overflow skipped."""
    if row.loss_scale is None and row.skipped is None:
        return cell(TYPESET.nothing)
    skipped = None
    if row.skipped is not None:
        skipped = "none skipped" if not row.skipped else f"{TYPESET.count(row.skipped)} skipped"
    return cell(TYPESET.scale(row.loss_scale), skipped)


def runs_cell(row: Row) -> Markup:
    """Returns how many runs there were, and how many of them failed."""
    return cell(str(row.runs), f"{row.failed} failed" if row.failed else None)
