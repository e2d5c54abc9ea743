"""The tables of the page: their headings, and what stands there for a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ampatch.sweeps.column import RESULTS, Column
from ampatch.sweeps.columns import BYTES, COLUMNS, TIMES, column_of, distance_text
from ampatch.sweeps.records.sweep import Distance, Sweep, SweepRow, Verdict
from ampatch.tools.numbers import TYPESET

METRICS_A_TABLE = 3  # the first ones stand in the table of results
BETTER = "how much better (+) or worse than that of O0 it is."
CAPTIONS = {
    RESULTS: f"Under the time of a step stand its quartiles, under a loss or metric {BETTER}",
    TIMES: "Medians over the runs that finished; bars are parts of the slowest step.",
    BYTES: "Tensors that training keeps, before an optimizer's step, in MiB, and casts of arguments in a "
    "step; a cast of a weight is reused while the weight stays.",
}


@dataclass(frozen=True, slots=True)
class PageCell:
    """A number, in small letters what belongs to it, and how long the bar below it is."""

    text: str
    small: str = ""
    bar: float | None = None  # a part of the longest one


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table: its headings, and a line for each row of the sweep that has one."""

    caption: str
    headings: Sequence[str]
    lines: Sequence[tuple[SweepRow, Sequence[PageCell]]]


def tables_of(sweep: Sweep) -> dict[str, list[PageTable]]:
    """Returns the tables below each heading; where there are many metrics, further tables hold these."""
    names = metric_names(sweep)
    groups = [names[start : start + METRICS_A_TABLE] for start in range(0, len(names), METRICS_A_TABLE)]
    tables = {heading: [measured_table(sweep, heading)] for heading in CAPTIONS}
    (it,), shown = tables[RESULTS], groups[0] if groups else []
    lines = [
        (row, [verdict_cell(row), *cells, runs_cell(row), *metric_cells(row, shown)])
        for row, cells in it.lines
    ]
    tables[RESULTS] = [replace(it, headings=["Verdict", *it.headings, "Runs", *shown], lines=lines)]
    for group in groups[1:]:
        lines = [(row, metric_cells(row, group)) for row in sweep.rows]
        tables[RESULTS].append(PageTable(f"Under a metric stands {BETTER}", group, lines))
    return {heading: [it for it in found if it.lines] for heading, found in tables.items()}


def measured_table(sweep: Sweep, heading: str) -> PageTable:
    """Returns the columns of a table, for the rows that have a number in one of them; all have a result."""
    columns = [column for column in COLUMNS if column.page and column.page.table == heading]
    if heading != RESULTS:  # what the machine did not tell has no column
        columns = [it for it in columns if any(it.of_row(row, sweep) is not None for row in sweep.rows)]
    largest = {
        key: max((column_of(key).of_row(row, sweep) or 0.0 for row in sweep.rows), default=0.0)
        for key in {column.page.bar[1] for column in columns if column.page.bar}
    }
    lines = [(row, [cell_of(column, row, sweep, largest) for column in columns]) for row in sweep.rows]
    if heading != RESULTS:
        lines = [(row, cells) for row, cells in lines if any(it.text != TYPESET.nothing for it in cells)]
    return PageTable(CAPTIONS[heading], [column.page.heading for column in columns], lines)


def cell_of(column: Column, row: SweepRow, sweep: Sweep, largest: Mapping[str, float]) -> PageCell:
    """Returns what the page says of a row in a column."""
    shown = column.page
    bar = shown.bar and part_of(column_of(shown.bar[0]).of_row(row, sweep), largest[shown.bar[1]])
    text = shown.write(TYPESET, column.of_row(row, sweep))
    return PageCell(text, shown.small(row) if shown.small else "", bar)


def metric_names(sweep: Sweep) -> list[str]:
    """Returns the names of all metrics of rows and runs, in the order in which they come."""
    of_rows = [name for row in sweep.rows for name in row.metrics]
    of_runs = [name for it in sweep.records if it.measured for name in it.measured.metrics]
    return list(dict.fromkeys(of_rows + of_runs))


def part_of(value: float | None, longest: float | None) -> float | None:
    """Returns the part that a value is of the longest, None if it is none."""
    part = value / longest if value is not None and longest else None
    return round(part, 3) if part is not None and 0 <= part <= 1 else None


def verdict_cell(row: SweepRow) -> PageCell:
    """Returns the verdict about a row."""
    return PageCell("not compared" if row.verdict is Verdict.UNKNOWN else row.verdict.value, row.reason)


def runs_cell(row: SweepRow) -> PageCell:
    """Returns how many runs there were."""
    return PageCell(str(row.runs), f"{row.failed} failed" if row.failed else "")


def metric_cells(row: SweepRow, names: Sequence[str]) -> list[PageCell]:
    """Returns the last values of these metrics."""
    return [distance_cell(row.metrics.get(name)) for name in names]


def distance_cell(distance: Distance | None) -> PageCell:
    """Returns a loss or metric, and how far it is from that of O0."""
    if distance is None or distance.value is None:
        return PageCell(TYPESET.nothing)
    return PageCell(TYPESET.number(distance.value, 4), distance_text(distance))
