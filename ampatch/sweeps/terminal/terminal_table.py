"""The tables of the terminal: of a sweep and of a comparison, as wide as there is room for."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.box import Box
from rich.console import Console
from rich.table import Table

from ampatch.sweeps.records.numbers import ASCII
from ampatch.sweeps.records.row_names import keys_of
from ampatch.sweeps.records.sweep import Distance, Row, Sweep
from ampatch.sweeps.terminal.caption import title
from ampatch.sweeps.terminal.plain import printable
from ampatch.sweeps.verdicts.change import Change
from ampatch.sweeps.verdicts.compare import Comparison
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.sweeps.verdicts.summary import step_ms

WIDTH = 80
# rich's own boxes that are this light are not in ASCII.
RULES = "    \n    \n -- \n    \n    \n -- \n    \n    \n"
TOGETHER, APART = 0, (0, 1, 0, 0)  # the room beside columns

Line = TypeVar("Line", Row, Change)


@dataclass(frozen=True, slots=True)
class Column(Generic[Line]):
    """One column of numbers: its heading, how a cell is written, and when it is left out.

    Where there is no room for all, those with the highest `rank` go first; those of rank 0 stay.
    """

    heading: str
    write: Callable[[Line], str]
    rank: int = 0


# ---- A sweep ----

TIMES = (
    Column("ms a\nstep", lambda row: ASCII.number(step_ms(row), 4)),
    Column("+-", lambda row: ASCII.number(half_range(row), 2), 9),
    Column("speed\nto O0", lambda row: ASCII.ratio(row.speed), 2),
    Column("peak\nMiB", lambda row: ASCII.number(row.peak_mib), 6),
)
LOSS = Column("final\nloss", lambda row: ASCII.number(row.loss.value), 4)
OUTCOMES = (
    Column("from\nO0", lambda row: ASCII.signed(worst(row)), 3),
    Column("skip-\nped", lambda row: ASCII.count(row.skipped), 8),
    Column("loss\nscale", lambda row: ASCII.scale(row.loss_scale), 7),
)


def half_range(row: Row) -> float | None:
    """Returns half of the range between the quartiles of a step's time; a single time has no range."""
    it = row.step_ms
    return (it.high - it.low) / 2 if it and it.count > 1 else None


def worst(row: Row) -> float | None:
    """Returns the distance of that loss or metric which did worst, in spreads: the verdict goes by it."""
    known = [it.spreads for it in (row.loss, *row.metrics.values()) if it.spreads is not None]
    return min(known, default=None)


def build_table(sweep: Sweep, *, encoding: str = "ascii", width: int = WIDTH) -> Table:
    """Builds the table, one row a level; columns that matter less are left out where there is no room."""
    keys = keys_of(row.name for row in sweep.rows)
    metric = most_important(dict.fromkeys(name for row in sweep.rows for name in row.metrics))
    of_metric = [metric_column(metric, encoding)] if metric else []
    columns = (*TIMES, LOSS, *of_metric, *OUTCOMES)

    def make(shown: Sequence[Column[Row]]) -> Table:
        table = make_table(printable(title(sweep), encoding), shown)
        table.add_column("\nverdict", no_wrap=True)
        for row in sweep.rows:
            table.add_row(keys[row.name], *(column.write(row) for column in shown), verdict_of(row))
        return table

    return fit(make, columns, width)


def metric_column(metric: str, encoding: str) -> Column[Row]:
    """Makes the column of a metric, with its name in as many lines as it needs."""
    heading = heading_of(metric, encoding)
    return Column(heading, lambda row: metric_value(row.metrics.get(metric)), 1)


def heading_of(metric: str, encoding: str) -> str:
    """Breaks the name of a metric into lines of 8 characters.

    >>> heading_of("val/top5_accuracy", "ascii")
    'val/\\ntop5_\\naccuracy'
    """
    parted = printable(metric, encoding).replace("_", "_ ").replace("/", "/ ")
    lines = textwrap.wrap(parted, 8) or [ASCII.nothing]
    return "\n".join(line.replace(" ", "") for line in lines[:4])


def metric_value(distance: Distance | None) -> str:
    """Writes the value of a metric, in four digits."""
    return ASCII.number(distance.value if distance else None, 4)


def verdict_of(row: Row) -> str:
    """Writes the verdict; for a row without one, that it was not run."""
    return row.verdict.value if row.runs else "not run"


# ---- Two sweeps ----


def build_comparison(comparison: Comparison, *, encoding: str = "ascii", width: int = WIDTH) -> Table:
    """Builds the table of a comparison, one row a level."""
    keys = keys_of(change.name for change in comparison.rows)
    metric = most_important(dict.fromkeys(name for change in comparison.rows for name in change.metrics))
    columns = change_columns(metric, encoding)

    def make(shown: Sequence[Column[Change]]) -> Table:
        table = make_table("before and after", shown)
        table.add_column("\ngot worse")
        for change in comparison.rows:
            cells = (column.write(change) for column in shown)
            table.add_row(keys[change.name], *cells, got_worse(change))
        return table

    return fit(make, columns, width)


def change_columns(metric: str | None, encoding: str) -> tuple[Column[Change], ...]:
    """Makes the columns of a comparison; its results are those of a metric, without one of the loss."""

    def result(change: Change) -> Distance | None:
        return change.metrics.get(metric) if metric else change.loss

    def value(change: Change, field: str) -> float | None:
        it = result(change)
        return getattr(it, field) if it else None

    what = heading_of(metric, encoding) if metric else "final\nloss"
    return (
        Column("ms\nbefore", lambda it: ASCII.number(step_ms(it.before), 4), 5),
        Column("ms\nafter", lambda it: ASCII.number(step_ms(it.after), 4), 4),
        Column("speed", lambda it: ASCII.ratio(it.speed)),
        Column("memory", lambda it: ASCII.ratio(it.memory), 6),
        Column(f"{what}\nbefore", lambda it: ASCII.number(value(it, "baseline"), 4), 3),
        Column("\nafter", lambda it: ASCII.number(value(it, "value"), 4), 2),
        Column("spreads", lambda it: ASCII.signed(value(it, "spreads")), 1),
    )


def got_worse(change: Change) -> str:
    """Names what got worse in a row; says so of one that was not compared."""
    faults = dict.fromkeys(regression.fault.value for regression in change.regressions)
    if faults or not change.obstacle:
        return ", ".join(faults) or ASCII.nothing
    return "new" if change.before is None else "not compared"


# ---- Both ----


def make_table(heading: str, columns: Iterable[Column]) -> Table:
    """Makes an empty table with a column for the level, and these; no cell of them is broken."""
    box = Box(RULES, ascii=True)
    table = Table(title=heading, box=box, padding=TOGETHER, pad_edge=False, show_edge=False)
    table.title_justify = "left"
    table.add_column("\nlevel", no_wrap=True)
    for column in columns:
        above = "\n" * (1 - column.heading.count("\n"))  # a heading stands right above its numbers
        table.add_column(above + column.heading, justify="right", no_wrap=True)
    return table


def fit(
    make: Callable[[Sequence[Column[Line]]], Table], columns: Sequence[Column[Line]], width: int
) -> Table:
    """Makes a table that fits, or else one of the columns that stay, which is wider than there is room.

    Columns come in by their rank, as long as there is room; a narrow one may where a wide one may not.
    """
    shown = [column for column in columns if column.rank == 0]
    for added in sorted(columns, key=lambda it: it.rank):
        wider = [column for column in columns if column in shown or column is added]
        if width_needed(make(wider)) <= width:
            shown = wider
    table = make(shown)
    needed = width_needed(table)
    if needed > width:
        table.width = needed  # rich would cut cells off, and half a number is a wrong one
        return table
    table.padding = APART
    if width_needed(table) > width:
        table.padding = TOGETHER
    return table


def width_needed(table: Table) -> int:
    """Returns how wide a table is at least."""
    return Console(width=1000).measure(table).minimum
