"""The tables of the page: their headings, and what stands there for a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from ampatch.sweeps.records.record import Measured
from ampatch.sweeps.records.sweep import Distance, Sweep, SweepRow, Verdict
from ampatch.sweeps.verdicts.summary import step_ms
from ampatch.tools.numbers import TYPESET

MIB = 2**20
METRICS_A_TABLE = 3  # the first ones stand in the table of results
RESULTS = ("Verdict", "ms a step", "Speed", "Peak memory", "Final loss", "Loss scale", "Runs")
TIMES = (
    "Steps a second",
    "Samples a second",
    "Speed vs fastest",
    "Forward, ms",
    "Backward, ms",
    "Update, ms",
)
BYTES = ("Parameters", "Masters", "Gradients", "Optimizer state", "Kept casts", "Together")
CASTS = ("Casts made", "Casts reused")


@dataclass(frozen=True, slots=True)
class Cell:
    """A number, in small letters what belongs to it, and how long the bar below it is."""

    text: str
    small: str = ""
    bar: float | None = None  # a part of the longest one


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its headings, and a line for each row of the sweep that has one."""

    caption: str
    headings: Sequence[str]
    lines: Sequence[tuple[SweepRow, Sequence[Cell]]]


def result_tables(sweep: Sweep) -> list[Table]:
    """Returns the table that people decide by, and where there are many metrics tables of these."""
    metrics = metric_names(sweep)
    groups = [metrics[start : start + METRICS_A_TABLE] for start in range(0, len(metrics), METRICS_A_TABLE)]
    first = groups[0] if groups else []
    largest = max((row.peak_mib or 0.0 for row in sweep.rows), default=0.0)
    lines = [(row, [*result_cells(row, largest), *metric_cells(row, first)]) for row in sweep.rows]
    words = "how much better (+) or worse than that of O0 it is."
    caption = f"Under the time of a step stand its quartiles, under a loss or metric {words}"
    more = [
        Table(
            f"Under a metric stands {words}", names, [(row, metric_cells(row, names)) for row in sweep.rows]
        )
        for names in groups[1:]
    ]
    return [Table(caption, [*RESULTS, *first], lines), *more] if lines else []


def metric_names(sweep: Sweep) -> list[str]:
    """Returns the names of all metrics of rows and runs, in the order in which they come."""
    of_rows = [name for row in sweep.rows for name in row.metrics]
    of_runs = [name for it in sweep.records if it.measured for name in it.measured.metrics]
    return list(dict.fromkeys(of_rows + of_runs))


def time_tables(sweep: Sweep) -> list[Table]:
    """Returns the table of what a step's time goes into, if any was measured."""
    longest = max((step_ms(row) or 0.0 for row in sweep.rows), default=0.0)
    lines = []
    for row in sweep.rows:
        if row.step_ms:
            rates = numbers(row.steps_per_second, row.samples_per_second)
            parts = numbers(row.forward_ms, row.backward_ms, row.update_ms, longest=longest)
            lines.append((row, [*rates, Cell(TYPESET.ratio(row.speed_to_fastest)), *parts]))
    caption = "Medians over the runs that finished; bars are parts of the slowest step."
    return [Table(caption, TIMES, lines)] if lines else []


def byte_tables(sweep: Sweep) -> list[Table]:
    """Returns the table of bytes and of casts, if any were measured."""
    runs = [(row, measured_of(row, sweep)) for row in sweep.rows]
    sizes = [next((astuple(it.bytes) for it in own if it.bytes), ()) for _, own in runs]
    largest = max((sum(kinds) / MIB for kinds in sizes), default=0.0)
    lines = []
    for (row, own), kinds in zip(runs, sizes, strict=True):
        casts = [astuple(it.casts) for it in own if it.casts]
        if kinds or casts:
            mib = [count / MIB for count in (*kinds, sum(kinds))] if kinds else [None] * len(BYTES)
            counts = map(fmean, zip(*casts, strict=True)) if casts else [None] * len(CASTS)
            lines.append((row, [*numbers(*mib, longest=largest), *numbers(*counts)]))
    caption = (
        "Tensors that training keeps, before an optimizer's step, in MiB, and casts of arguments in a step; "
        "a cast of a weight is reused while the weight stays."
    )
    return [Table(caption, [*BYTES, *CASTS], lines)] if lines else []


def measured_of(row: SweepRow, sweep: Sweep) -> list[Measured]:
    """Returns what was measured in the runs of a row that finished, else in those that did not."""
    own = [it for it in sweep.records if it.row == row.name and it.measured]
    return [it.measured for it in own if not it.failed] or [it.measured for it in own]


# ---- Cells ----


def numbers(*values: float | None, longest: float | None = None) -> list[Cell]:
    """Returns cells of plain numbers, with bars if one is the longest."""
    return [Cell(TYPESET.number(value), bar=part_of(value, longest)) for value in values]


def part_of(value: float | None, longest: float | None) -> float | None:
    """Returns the part that a value is of the longest, None if it is none."""
    part = value / longest if value is not None and longest else None
    return round(part, 3) if part is not None and 0 <= part <= 1 else None


def result_cells(row: SweepRow, largest: float) -> list[Cell]:
    """Returns what the table of results says of a row."""
    it, skipped = row.step_ms, row.skipped
    quartiles = f"{TYPESET.number(it.low)}–{TYPESET.number(it.high)}" if it and it.count > 1 else ""  # noqa: RUF001
    memory = TYPESET.nothing if row.peak_mib is None else f"{TYPESET.number(row.peak_mib)} MiB"
    of_o0 = "" if row.memory is None else f"{TYPESET.ratio(row.memory)} O0"
    overflows = "" if skipped is None else f"{TYPESET.count(skipped) if skipped else 'none'} skipped"
    return [
        Cell("not compared" if row.verdict is Verdict.UNKNOWN else row.verdict.value, row.reason),
        Cell(TYPESET.number(it and it.median), quartiles),
        Cell(TYPESET.ratio(row.speed), bar=part_of(row.speed_to_fastest, 1.0)),
        Cell(memory, of_o0, part_of(row.peak_mib, largest)),
        distance_cell(row.loss),
        Cell(TYPESET.scale(row.loss_scale), overflows),
        Cell(str(row.runs), f"{row.failed} failed" if row.failed else ""),
    ]


def metric_cells(row: SweepRow, names: Sequence[str]) -> list[Cell]:
    """Returns the last values of these metrics."""
    return [distance_cell(row.metrics.get(name)) for name in names]


def distance_cell(distance: Distance | None) -> Cell:
    """Returns a loss or metric, and how far it is from that of O0."""
    if distance is None or distance.value is None:
        return Cell(TYPESET.nothing)
    return Cell(TYPESET.number(distance.value, 4), distance_text(distance))


def distance_text(distance: Distance) -> str:
    """Returns how far a value is from that of O0, in words; nothing for O0 itself."""
    if distance.spreads is None:
        return ""
    if distance.unit != "percent":
        return f"{TYPESET.signed(distance.spreads)} spreads"
    # A spread of percents is a part of O0's value.
    if not distance.baseline or distance.spread is None:
        return f"{TYPESET.signed(distance.spreads)} units"
    percent = 100 * distance.spreads * (distance.spread / abs(distance.baseline))
    return f"{TYPESET.signed(percent)} %" if math.isfinite(percent) else ""
