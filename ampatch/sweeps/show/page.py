"""A sweep as one page that opens anywhere: no network, no script, no file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ampatch.sweeps.rows import LAST_LOSSES, TOLERANCE, Level, Sweep, Verdict, keys_of, metric_names
from ampatch.sweeps.show.terminal import COLUMNS, distance_text, part_of, said_of_warmup
from ampatch.tools.numbers import NOTHING, number, typeset
from ampatch.tools.page import draw_charts, render

METRICS_A_TABLE = 3  # the first ones stand in the table of results
BETTER = "how much better (+) or worse than that of O0 it is."
CAPTION = f"Under the time of a step stand its quartiles, under a loss or metric {BETTER}"


@dataclass(frozen=True, slots=True)
class PageCell:
    """A number, in small letters what belongs to it, and how long the bar below it is."""

    text: str
    small: str = ""
    bar: float | None = None  # a part of the longest one


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table: its headings, and the cells of each level."""

    caption: str
    headings: Sequence[str]
    lines: Sequence[tuple[Level, Sequence[PageCell]]]


def write_page(sweep: Sweep) -> str:
    """Returns the page of a sweep as one HTML file, to be written as UTF-8; charts need NumPy."""
    return render(
        Path(__file__).parent,
        sweep.settings.script,
        draw_charts("sweep.html", "ampatch.sweeps.show.charts", sweep),
        sweep=sweep,
        version=sweep.environment.ampatch,
        keys=keys_of(row.name for row in sweep.rows),
        tables=[table for table in tables_of(sweep) if table.lines],
        warmup=said_of_warmup(sweep),
        on_device={run.memory for run in sweep.records if run.peak_mib is not None} == {"device"},
        last_losses=LAST_LOSSES,
        tolerance=TOLERANCE,
        details=asdict(sweep.settings) | asdict(sweep.environment),
    )


def tables_of(sweep: Sweep) -> list[PageTable]:
    """Returns the table of results; where there are many metrics, further tables hold these."""
    columns = [column for column in COLUMNS if column.page]
    names = metric_names(sweep.rows, sweep.records)
    groups = [names[start : start + METRICS_A_TABLE] for start in range(0, len(names), METRICS_A_TABLE)]
    first, *others = groups or [[]]
    lines = []
    for row in sweep.rows:
        cells = [
            PageCell(
                "not compared" if row.verdict is Verdict.UNKNOWN else row.verdict, row.reason or row.note
            )
        ]
        for column in columns:
            value, text = column.of(row), typeset(column.write(column.of(row)))
            bar = part_of(value, list(map(column.of, sweep.rows))) if column.has_bar else None
            cells.append(PageCell(text, column.small(row) if value is not None else "", bar))
        cells.append(PageCell(str(row.runs), f"{row.failed} failed" if row.failed else ""))
        lines.append((row, [*cells, *metric_cells(row, first)]))
    tables = [PageTable(CAPTION, ["Verdict", *(it.page for it in columns), "Runs", *first], lines)]
    for group in others:
        lines = [(row, metric_cells(row, group)) for row in sweep.rows]
        tables.append(PageTable(f"Under a metric stands {BETTER}", group, lines))
    return tables


def metric_cells(row: Level, names: Sequence[str]) -> list[PageCell]:
    """Returns the last values of these metrics, and how far they are from those of O0."""
    found = [row.metrics.get(name) for name in names]
    return [
        PageCell(typeset(NOTHING))
        if it is None or it.value is None
        else PageCell(typeset(number(it.value, 4)), distance_text(it))
        for it in found
    ]
