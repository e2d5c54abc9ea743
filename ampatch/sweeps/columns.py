"""The columns of a sweep, an entry each, by which all outputs go: terminal, files, page, comparison.

To add a column, measure it as a field of `Measured`, and write its entry into COLUMNS.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from operator import itemgetter

from ampatch.sweeps.column import Column, Limit, Shown, number_of
from ampatch.sweeps.measure.steps import spread_of
from ampatch.sweeps.records.record import LAST_LOSSES, Measured, Spread
from ampatch.sweeps.records.sweep import Distance, SweepRow
from ampatch.sweeps.verdicts.distance import mean
from ampatch.tools.numbers import TYPESET, Alphabet

MIB = 2**20
TIMES, BYTES = "Times of a step", "Bytes and casts"


# ---- One number of many runs ----


def median(values: Sequence[float | Spread]) -> float:
    """Returns the median, of spreads that of their medians."""
    return statistics.median(map(number_of, values))


def pool_spreads(spreads: Sequence[Spread]) -> Spread:
    """Returns the spread of several runs as one: the median of their medians, and quartiles around it.

    Steps of one run are alike, and runs may differ by more than their steps do. So a quartile is that of the
    typical run (the median of the runs' own) or that of the runs' medians, whichever is farther out. `count`
    is of all the steps.

    >>> pool_spreads([Spread(10, 7, 12, 100), Spread(10, 8, 14, 100)])
    Spread(median=10.0, low=7.5, high=13.0, count=200)
    """
    medians = spread_of([spread.median for spread in spreads])
    return Spread(
        median=medians.median,
        low=min(medians.low, statistics.median(spread.low for spread in spreads)),
        high=max(medians.high, statistics.median(spread.high for spread in spreads)),
        count=sum(spread.count for spread in spreads),
    )


def step_rate(spreads: Sequence[Spread]) -> float | None:
    """Returns steps a second."""
    return divide(1000, pool_spreads(spreads).median)


def sample_rate(runs: Sequence[Measured]) -> float | None:
    """Returns samples a second."""
    spreads = [it.step_ms for it in runs if it.step_ms]
    samples = [it.samples for it in runs if it.samples is not None]
    rate = step_rate(spreads) if spreads and samples else None
    return None if rate is None else rate * median(samples)


def divide(value: float | None, unit: float | None) -> float | None:
    """Divides, where there are two numbers that can be divided.

    >>> divide(3.0, 2.0), divide(3.0, None), divide(3.0, 0.0)
    (1.5, None, None)
    """
    return None if value is None or not unit else value / unit


# ---- Numbers of a row ----


def half_range(row: SweepRow) -> float | None:
    """Returns half of the range between the quartiles of a step's time; a single time has no range."""
    it = row.step_ms
    return (it.high - it.low) / 2 if it and it.count > 1 else None


def worst(row: SweepRow) -> float | None:
    """Returns the distance of that loss or metric which did worst, in spreads: the verdict goes by it."""
    known = [it.spreads for it in (row.loss, *row.metrics.values()) if it.spreads is not None]
    return min(known, default=None)


# ---- Words of the page ----


def in_mib(alphabet: Alphabet, count: float | None) -> str:
    """Writes bytes in MiB."""
    return alphabet.number(None if count is None else count / MIB)


def in_percent(alphabet: Alphabet, part: float | None) -> str:
    """Writes a part in percent."""
    return alphabet.nothing if part is None else alphabet.percent(round(part, 3))


def with_mib(alphabet: Alphabet, mib: float | None) -> str:
    """Writes MiB with their unit."""
    return alphabet.number(mib) + (" MiB" if mib is not None else "")


def quartiles(row: SweepRow) -> str:
    """Writes between which times the middle half of the steps lies."""
    it = row.step_ms
    return f"{TYPESET.number(it.low)}–{TYPESET.number(it.high)}" if it and it.count > 1 else ""  # noqa: RUF001


def memory_to_o0(row: SweepRow) -> str:
    """Writes how many times the memory of O0 it is."""
    return "" if row.memory is None else f"{TYPESET.ratio(row.memory)} O0"


def overflows(row: SweepRow) -> str:
    """Writes how many steps overflows skipped."""
    return "" if row.skipped is None else f"{TYPESET.count(row.skipped) if row.skipped else 'none'} skipped"


def distance_text(distance: Distance) -> str:
    """Writes how far a value is from that of O0; nothing for O0 itself."""
    if distance.spreads is None:
        return ""
    if distance.unit != "percent":
        return f"{TYPESET.signed(distance.spreads)} spreads"
    # A spread of percents is a part of O0's value.
    if not distance.baseline or distance.spread is None:
        return f"{TYPESET.signed(distance.spreads)} units"
    percent = 100 * distance.spreads * (distance.spread / abs(distance.baseline))
    return f"{TYPESET.signed(percent)} %" if math.isfinite(percent) else ""


# ---- The table: from left to right, as terminal and page show them ----

two_digits = partial(Alphabet.number, digits=2)
four_digits = partial(Alphabet.number, digits=4)

SLOWER = Limit(
    option="slower",
    default=0.05,
    meaning="how much slower than A is too slow, as a fraction; default: 0.05",
    fault="slower",
    sentence="is {part} slower: {new} ms a step against {old} before",
    ratio="speed",
    unit="ms",
    is_speed=True,
    missing="the time of a step",
)
MORE_MEMORY = Limit(
    option="more_memory",
    default=None,
    meaning="how much more memory than A is too much; default: no limit",
    fault="more memory",
    sentence="needs {part} more memory: {new} against {old} MiB before",
    ratio="memory",
)


def part_of_time(heading: str) -> Shown:
    """Shows milliseconds in the table of times, with a part of the slowest step as a bar."""
    return Shown(f"{heading}, ms", table=TIMES, bar=(heading.lower() + "_ms", "step_ms"))


def bytes_of(part: str, heading: str, csv: int) -> Column:
    """Makes the column of a part of the bytes, which are the same in all runs of a row."""
    shown = Shown(heading, in_mib, BYTES, bar=(f"{part}_bytes", "bytes"))
    return Column(f"{part}_bytes", csv, itemgetter(0), f"bytes.{part}", page=shown)


COLUMNS = (
    Column("steps", csv=1),
    Column(
        "step_ms",
        csv=3,
        pool=pool_spreads,
        terminal=Shown("ms a\nstep", four_digits),
        page=Shown("ms a step", small=quartiles),
        said="ms a step: median {warmup}, +- half the range between the quartiles.",
        limit=SLOWER,
    ),
    Column("step_ms_low", 4, run="step_ms.low"),
    Column("step_ms_high", 5, run="step_ms.high"),
    Column("half_range", row=half_range, terminal=Shown("\n+-", two_digits)),
    Column(
        "speed",
        terminal=Shown("speed\nto O0", Alphabet.ratio),
        page=Shown("Speed", Alphabet.ratio, bar=("speed_to_fastest", "speed_to_fastest")),
    ),
    Column(
        "peak_mib",
        csv=12,
        pool=median,
        terminal=Shown("peak\nMiB"),
        page=Shown("Peak memory", with_mib, small=memory_to_o0, bar=("peak_mib", "peak_mib")),
        said="peak MiB: {memory} memory.",
        limit=MORE_MEMORY,
    ),
    Column("memory", csv=11),
    Column("first_loss", csv=20),
    Column(
        "final_loss",
        csv=21,
        row=lambda row: row.loss.value,
        terminal=Shown("final\nloss"),
        page=Shown("Final loss", four_digits, small=lambda row: distance_text(row.loss)),
        said=f"final loss: mean of the last {LAST_LOSSES}.",
    ),
    Column("loss_noise", csv=22),
    Column("from_o0", row=worst, terminal=Shown("from\nO0", Alphabet.signed), said="{distances}"),
    Column(
        "skipped",
        2,
        lambda values: mean(list(map(len, values))),
        terminal=Shown("skip-\nped", Alphabet.count),
    ),
    Column(
        "loss_scale",
        csv=23,
        pool=statistics.median_low,  # a scale that was in use, not one between two: they are powers of 2
        terminal=Shown("loss\nscale", Alphabet.scale),
        page=Shown("Loss scale", Alphabet.scale, small=overflows),
    ),
    Column("steps_per_second", 9, step_rate, pooled="step_ms", page=Shown("Steps a second", table=TIMES)),
    Column("samples_per_second", 10, sample_rate, pooled="", page=Shown("Samples a second", table=TIMES)),
    Column("speed_to_fastest", page=Shown("Speed vs fastest", Alphabet.ratio, TIMES)),
    Column("forward_ms", 6, median, page=part_of_time("Forward")),
    Column("backward_ms", 7, median, page=part_of_time("Backward")),
    Column("update_ms", 8, median, page=part_of_time("Update")),
    bytes_of("parameters", "Parameters", 13),
    bytes_of("masters", "Masters", 14),
    bytes_of("gradients", "Gradients", 15),
    bytes_of("optimizer_state", "Optimizer state", 16),
    bytes_of("casts", "Kept casts", 17),
    Column(
        "bytes",
        pool=lambda values: sum(astuple(values[0])),
        page=Shown("Together", in_mib, BYTES, bar=("bytes", "bytes")),
    ),
    Column("casts_made", 18, mean, "casts.made", page=Shown("Casts made", table=BYTES)),
    Column("waited", 24, max, "waits.waited", page=Shown("Waited for others", in_percent, TIMES)),
    Column("throttled", 25, max, "waits.throttled"),
    Column("forced_switches", 26, max, "waits.forced"),
    Column("processor_ms", 27, median, "waits.processor_ms"),
    Column("casts_reused", 19, mean, "casts.reused", page=Shown("Casts reused", table=BYTES)),
)
LIMITED = tuple(column for column in COLUMNS if column.limit)


def column_of(key: str) -> Column:
    """Returns the column of a key."""
    return next(column for column in COLUMNS if column.key == key)
