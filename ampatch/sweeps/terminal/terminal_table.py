"""The tables of the terminal: a sweep, and two sweeps side by side; columns that matter less go first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import Box
from rich.console import Console
from rich.table import Table

from ampatch.sweeps.records.numbers import ASCII
from ampatch.sweeps.records.row_names import keys_of
from ampatch.sweeps.records.sweep import Distance, Sweep, SweepRow
from ampatch.sweeps.terminal.caption import title
from ampatch.sweeps.terminal.plain import printable
from ampatch.sweeps.verdicts.change import RowChange
from ampatch.sweeps.verdicts.compare import Comparison
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.sweeps.verdicts.summary import step_ms

WIDTH = 80
# rich's own boxes that are this light are not in ASCII.
RULES = "    \n    \n -- \n    \n    \n -- \n    \n    \n"


@dataclass(frozen=True, slots=True)
class TerminalColumn:
    """One column of numbers: its heading, and its cells by row.

    Where there is no room for all, those with the highest `rank` go first; those of rank 0 stay.
    """

    heading: str
    cells: Sequence[str]
    rank: int = 0


def build_table(sweep: Sweep, width: int = WIDTH) -> Table:
    """Builds the table, one row a level; columns that matter less are left out where there is no room."""
    rows = sweep.rows

    def column(heading: str, write: Callable[[SweepRow], str], rank: int = 0) -> TerminalColumn:
        return TerminalColumn(heading, [write(row) for row in rows], rank)

    metric = most_important(dict.fromkeys(name for row in rows for name in row.metrics))
    of_metric = [column(heading_of(metric), lambda row: value_of(row.metrics.get(metric)), 1)]
    columns = (
        column("ms a\nstep", lambda row: ASCII.number(step_ms(row), 4)),
        column("+-", lambda row: ASCII.number(half_range(row), 2), 9),
        column("speed\nto O0", lambda row: ASCII.ratio(row.speed), 2),
        column("peak\nMiB", lambda row: ASCII.number(row.peak_mib), 6),
        column("final\nloss", lambda row: ASCII.number(row.loss.value), 4),
        *(of_metric if metric else ()),
        column("from\nO0", lambda row: ASCII.signed(worst(row)), 3),
        column("skip-\nped", lambda row: ASCII.count(row.skipped), 8),
        column("loss\nscale", lambda row: ASCII.scale(row.loss_scale), 7),
    )
    verdicts = {row.name: row.verdict.value if row.runs else "not run" for row in rows}
    return fit(printable(title(sweep)), columns, "verdict", verdicts, width)


def half_range(row: SweepRow) -> float | None:
    """Returns half of the range between the quartiles of a step's time; a single time has no range."""
    it = row.step_ms
    return (it.high - it.low) / 2 if it and it.count > 1 else None


def worst(row: SweepRow) -> float | None:
    """Returns the distance of that loss or metric which did worst, in spreads: the verdict goes by it."""
    known = [it.spreads for it in (row.loss, *row.metrics.values()) if it.spreads is not None]
    return min(known, default=None)


def heading_of(metric: str | None) -> str:
    """Breaks the name of a metric into lines of 8 characters.

    >>> heading_of("val/top5_accuracy")
    'val/\\ntop5_\\naccuracy'
    """
    split = printable(metric or "").replace("_", "_ ").replace("/", "/ ")
    lines = textwrap.wrap(split, 8) or [ASCII.nothing]
    return "\n".join(line.replace(" ", "") for line in lines[:4])


def value_of(distance: Distance | None, field: str = "value") -> str:
    """Writes a value, or what it is compared with, in four digits."""
    return ASCII.number(getattr(distance, field) if distance else None, 4)


def build_comparison(comparison: Comparison, width: int = WIDTH) -> Table:
    """Builds the table of a comparison; its results are those of a metric, without one of the loss."""
    rows = comparison.rows
    metric = most_important(dict.fromkeys(name for change in rows for name in change.metrics))
    results = [change.metrics.get(metric) if metric else change.loss for change in rows]
    what = heading_of(metric) if metric else "final\nloss"

    def column(heading: str, write: Callable[[RowChange], str], rank: int = 0) -> TerminalColumn:
        return TerminalColumn(heading, [write(change) for change in rows], rank)

    columns = (
        column("ms\nbefore", lambda it: ASCII.number(step_ms(it.before), 4), 5),
        column("ms\nafter", lambda it: ASCII.number(step_ms(it.after), 4), 4),
        column("speed", lambda it: ASCII.ratio(it.speed)),
        column("memory", lambda it: ASCII.ratio(it.memory), 6),
        TerminalColumn(f"{what}\nbefore", [value_of(it, "baseline") for it in results], 3),
        TerminalColumn("\nafter", [value_of(it) for it in results], 2),
        TerminalColumn("spreads", [ASCII.signed(it.spreads if it else None) for it in results], 1),
    )
    return fit("before and after", columns, "got worse", {it.name: got_worse(it) for it in rows}, width)


def got_worse(change: RowChange) -> str:
    """Names what got worse in a row; says so of one that was not compared."""
    faults = dict.fromkeys(regression.fault for regression in change.regressions)
    if faults or not change.obstacle:
        return ", ".join(faults) or ASCII.nothing
    return "new" if change.before is None else "not compared"


def fit(
    heading: str, columns: Sequence[TerminalColumn], last: str, said: Mapping[str, str], width: int
) -> Table:
    """Makes a table that fits, or else one of the columns that stay, which is wider than there is room.

    `said` stands in the `last` column, by the name of the row. Columns come in by their rank, as long as
    there is room; a narrow one may where a wide one may not.
    """
    shown = [column for column in columns if column.rank == 0]
    for added in sorted(columns, key=lambda it: it.rank):
        wider = [column for column in columns if column in shown or column is added]
        if width_needed(make_table(heading, wider, last, said)) <= width:
            shown = wider
    table = make_table(heading, shown, last, said)
    # rich would cut cells off, and half a number is a wrong one.
    table.width = needed if (needed := width_needed(table)) > width else None
    return table


def make_table(heading: str, columns: Sequence[TerminalColumn], last: str, said: Mapping[str, str]) -> Table:
    """Makes a table with a column for the level, these, and one for what is said; no number is broken."""
    table = Table(title=heading, title_justify="left", box=Box(RULES, ascii=True), show_edge=False)
    table.pad_edge, table.padding = False, 0
    table.add_column("\nlevel", no_wrap=True)
    for column in columns:
        above = "\n" * (1 - column.heading.count("\n"))  # a heading stands right above its numbers
        table.add_column(above + column.heading, justify="right", no_wrap=True)
    table.add_column(f"\n{last}")
    keys = keys_of(said)
    for index, (name, text) in enumerate(said.items()):
        table.add_row(keys[name], *(column.cells[index] for column in columns), text)
    return table


def width_needed(table: Table) -> int:
    """Returns how wide a table is at least."""
    return Console(width=1000).measure(table).minimum
