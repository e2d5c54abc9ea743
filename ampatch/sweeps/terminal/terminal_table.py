"""The tables of the terminal: a sweep, and two sweeps side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.box import Box
from rich.console import Console
from rich.table import Table

from ampatch.sweeps.column import Column
from ampatch.sweeps.columns import COLUMNS, LIMITED
from ampatch.sweeps.records.sweep import Distance, Sweep, SweepRow, keys_of
from ampatch.sweeps.terminal.caption import printable, title
from ampatch.sweeps.verdicts.change import RowChange
from ampatch.sweeps.verdicts.compare import Comparison
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.tools.numbers import ASCII

WIDTH = 80
LONGEST_WORD = 20
# rich's own boxes that are this light are not in ASCII.
RULES = "    \n    \n -- \n    \n    \n -- \n    \n    \n"

Line = TypeVar("Line", SweepRow, RowChange)


def build_table(sweep: Sweep) -> Table:
    """Builds the table, one row a level."""
    metric = most_important(dict.fromkeys(name for row in sweep.rows for name in row.metrics))
    columns: dict[str, Callable[[SweepRow], str]] = {}
    for column in COLUMNS:
        if column.terminal:
            columns[column.terminal.heading] = partial(cell, column, sweep)
        if metric and column.key == "final_loss":
            columns[heading_of(metric)] = lambda row: value_of(row.metrics.get(metric))
    said = [row.verdict.value if row.runs else "not run" for row in sweep.rows]
    return make_table(printable(title(sweep)), columns, sweep.rows, "verdict", said)


def cell(column: Column, sweep: Sweep, row: SweepRow) -> str:
    """Writes the number of a row."""
    return column.terminal.write(ASCII, column.of_row(row, sweep))


def heading_of(metric: str) -> str:
    """Breaks the name of a metric into lines of 8 characters, two at least; words only if they are endless.

    >>> heading_of("val/top5_accuracy"), heading_of("f1"), heading_of("perplexity")
    ('val/\\ntop5_\\naccuracy', '\\nf1', '\\nperplexity')
    """
    split = printable(metric).replace("_", "_ ").replace("/", "/ ")
    is_endless = max(map(len, split.split()), default=0) > LONGEST_WORD
    lines = textwrap.wrap(split, 8, break_long_words=is_endless) or [ASCII.nothing]
    return "\n".join(line.replace(" ", "") for line in ["", *lines][-max(2, len(lines)) :][:4])


def value_of(distance: Distance | None, field: str = "value") -> str:
    """Writes a value, or what it is compared with, in four digits."""
    return ASCII.number(getattr(distance, field) if distance else None, 4)


def build_comparison(comparison: Comparison) -> Table:
    """Builds the table of a comparison; its results are those of a metric, without one of the loss."""
    rows = comparison.rows
    metric = most_important(dict.fromkeys(name for change in rows for name in change.metrics))
    what = heading_of(metric).strip() if metric else "final\nloss"

    def result(change: RowChange) -> Distance | None:
        return change.metrics.get(metric) if metric else change.loss

    columns: dict[str, Callable[[RowChange], str]] = {}
    for column in LIMITED:
        if unit := column.limit.unit:
            columns[f"{unit}\nbefore"] = partial(one_side, column, 0)
            columns[f"{unit}\nafter"] = partial(one_side, column, 1)
    columns |= {f"\n{it.limit.ratio}": partial(ratio, it) for it in LIMITED}
    columns |= {
        f"{what}\nbefore": lambda it: value_of(result(it), "baseline"),
        "\nafter ": lambda it: value_of(result(it)),
        "\nspreads": lambda it: ASCII.signed(result(it).spreads if result(it) else None),
    }
    return make_table("before and after", columns, rows, "got worse", list(map(got_worse, rows)))


def one_side(column: Column, side: int, change: RowChange) -> str:
    """Writes the number before or after."""
    return column.terminal.write(ASCII, change.sides(column)[side])


def ratio(column: Column, change: RowChange) -> str:
    """Writes how many times a number became what it was."""
    return ASCII.ratio(change.ratio(column))


def got_worse(change: RowChange) -> str:
    """Names what got worse in a row; says so of one that was not compared."""
    faults = dict.fromkeys(regression.fault for regression in change.regressions)
    if faults or not change.obstacle:
        return ", ".join(faults) or ASCII.nothing
    return "new" if change.before is None else "not compared"


def make_table(
    heading: str,
    columns: Mapping[str, Callable[[Line], str]],
    rows: Sequence[Line],
    last: str,
    said: Sequence[str],
) -> Table:
    """Makes a table with a column for the level, these by their headings, and one for what is said.

    It is never narrower than its numbers: rich would cut them, and half a number is a wrong one.
    """
    table = Table(title=heading, title_justify="left", box=Box(RULES, ascii=True), show_edge=False)
    table.pad_edge, table.padding = False, 0
    table.add_column("\nlevel", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"\n{last}")
    keys = keys_of(row.name for row in rows)
    for row, text in zip(rows, said, strict=True):
        table.add_row(keys[row.name], *(write(row) for write in columns.values()), text)
    needed = Console(width=1000).measure(table)
    table.width = min(needed.maximum, max(needed.minimum, WIDTH))
    return table
