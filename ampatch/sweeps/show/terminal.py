"""A sweep in the terminal: a line for each run while it goes on, a table when it is over."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from ampatch.sweeps import numbers
from ampatch.sweeps.judge.statistics import GUESSED_SPREAD, most_important
from ampatch.sweeps.numbers import duration, typeset
from ampatch.sweeps.rows import (
    LAST_LOSSES,
    TOLERANCE,
    WARMUP,
    Distance,
    Ending,
    Level,
    Outcome,
    Recommendation,
    Run,
    Sweep,
    Verdict,
    abbreviate,
    find_level,
    keys_of,
    metric_names,
)

WIDTH = 80
HEADLINES = {
    Outcome.TAKE: "Recommended: ",
    Outcome.STAY: "Recommended: ",
    Outcome.UNKNOWN: "Nothing is recommended.",
}


def show(stream: TextIO, text: str) -> None:
    """Prints lines, with what the encoding of the stream does not have in escapes; raises what it raises."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def write(sweep: Sweep) -> str:
    """Returns the table, what its columns mean, why rows failed, and the recommendation."""
    keys = keys_of(row.name for row in sweep.rows)
    lines = [title(sweep), *table_lines(sweep, keys)]
    lines += wrap(*(f"{key}: {name}" for name, key in keys.items() if name != key))
    lines += wrap(*explain_rows(sweep.rows, keys))
    lines += [failure_of(run, keys[run.row]) for run in sweep.records if run.failed]
    lines += ["", *wrap(explain_columns(sweep)), "", *wrap(write_recommendation(sweep.recommendation, keys))]
    return "\n".join(map(printable, lines))


def wrap(*paragraphs: str) -> Iterator[str]:
    """Yields the lines of paragraphs, broken at the width of the table; names are not broken at hyphens."""
    for paragraph in paragraphs:
        yield from textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False)


def table_lines(sweep: Sweep, keys: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of the table, a row for each level; no number is ever broken."""
    columns = table_of(sweep)
    headings = [["level"], *(heading.split("\n") for heading, _ in columns), ["verdict"]]
    height = max(map(len, headings))
    top = [[""] * (height - len(lines)) + lines for lines in headings]
    body = [[keys[row.name], *(cell(row) for _, cell in columns), verdict_of(row)] for row in sweep.rows]
    lines = [*map(list, zip(*top, strict=True)), *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        if number == height:
            yield "-" * (sum(widths) + len(widths) - 1)
        yield aligned(line, widths).rstrip()


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Puts cells side by side: the first and the last on the left, numbers on the right."""
    first, *numbers, last = zip(cells, widths, strict=True)
    return " ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in numbers), last[0]])


def verdict_of(row: Level) -> str:
    return row.verdict.value if row.runs else "not run"


def explain_rows(rows: Sequence[Level], keys: Mapping[str, str]) -> list[str]:
    """Returns what is to be said of rows, each text once, after the short names of those it is about."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for text in explain_row(row):
            texts.setdefault(text, []).append(keys[row.name])
    return [f"{', '.join(names)} {text}" for text, names in texts.items()]


def explain_row(row: Level) -> Iterator[str]:
    """Yields a verdict with its reason, where no lines of failed runs say as much, and the note."""
    is_told = row.verdict is Verdict.FAILED or row.outcome is Ending.INTERRUPTED
    if row.reason and row.runs and not is_told:
        yield f"{'not compared' if row.verdict is Verdict.UNKNOWN else row.verdict}: {row.reason}"
    if row.note:
        yield row.note


def failure_of(run: Run, name: str) -> str:
    """Says in one line how a run of a row of this name failed, and where its log is."""
    seed = f" seed {run.seed}" + (f" repeat {run.repeat}" if run.repeat else "")
    after = f" after {duration(run.seconds)}" if run.outcome is Ending.TIMED_OUT else ""
    made = f" (step {run.steps})" if run.steps else ""
    cause = f": {run.cause}" if run.cause else ""
    log = f" (log: {run.log})" if run.log else ""
    return f"{name}{seed} {run.outcome}{after}{made}{cause}{log}"


def write_recommendation(recommendation: Recommendation, keys: Mapping[str, str]) -> str:
    """Writes the recommendation; variants have their whole name once."""
    headline, row = HEADLINES[recommendation.outcome], recommendation.row
    reason = abbreviate(recommendation.reason, keys)
    if row is None:
        return f"{headline} {reason}"
    key = keys.get(row, row)
    return f"{headline}{row}{'' if key == row else f' ({key})'}. {reason}"


def printable(text: str) -> str:
    """Escapes what a terminal would obey, and halves of characters, which no encoding can write.

    >>> print(printable("caf\\u00e9 \\x1b[31m"))
    café \\x1b[31m
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# ---- Columns: what each shows of a level, in the terminal and on the page ----

LONGEST_WORD = 20


@dataclass(frozen=True, slots=True)
class Column:
    """A quantity of a level: its headings, and how it is written.

    Without a heading for the terminal, or the page, it is not there. `small` stands below it on the page; a
    bar there is as long as the part that the number is of the largest one.
    """

    terminal: str
    page: str
    of: Callable[[Level], float | None]
    write: Callable[[float | None], str] = numbers.number
    small: Callable[[Level], str] = lambda level: ""
    has_bar: bool = False


def half_range(level: Level) -> float | None:
    """Returns half of the range between the quartiles of a step's time; a single time has no range."""
    return (level.step_ms_high - level.step_ms_low) / 2 if level.timed > 1 else None


def worst(level: Level) -> float | None:
    """Returns the distance of that loss or metric which did worst, in spreads: the verdict goes by it."""
    known = [
        distance.spreads for distance in (level.loss, *level.metrics.values()) if distance.spreads is not None
    ]
    return min(known, default=None)


def quartiles(level: Level) -> str:
    """Writes between which times the middle half of the steps lies."""
    ends = [typeset(numbers.number(milliseconds)) for milliseconds in (level.step_ms_low, level.step_ms_high)]
    return "–".join(ends) if level.timed > 1 else ""  # noqa: RUF001


def distance_text(distance: Distance) -> str:
    """Writes how far a value is from that of O0; nothing for O0 itself."""
    if distance.spreads is None:
        return ""
    if distance.unit != "percent" or not distance.baseline or distance.spread is None:
        return f"{typeset(numbers.signed(distance.spreads))} spreads"
    percent = 100 * distance.spreads * (distance.spread / abs(distance.baseline))
    return f"{typeset(numbers.signed(percent))} %" if math.isfinite(percent) else ""


two_digits, four_digits = (partial(numbers.number, digits=digits) for digits in (2, 4))
COLUMNS = (
    Column("ms a\nstep", "ms a step", lambda level: level.step_ms, four_digits, quartiles),
    Column("\n+-", "", half_range, two_digits),
    Column("speed\nto O0", "Speed", lambda level: level.speed, numbers.ratio, has_bar=True),
    Column(
        *("peak\nMiB", "Peak MiB", lambda level: level.peak_mib),
        small=lambda level: "" if level.memory is None else f"{typeset(numbers.ratio(level.memory))} O0",
        has_bar=True,
    ),
    Column(
        *("final\nloss", "Final loss", lambda level: level.loss.value, four_digits),
        lambda level: distance_text(level.loss),
    ),
    Column("from\nO0", "", worst, numbers.signed),
    Column("skip-\nped", "Skipped", lambda level: level.skipped, numbers.count),
    Column("loss\nscale", "Loss scale", lambda level: level.loss_scale, numbers.scale),
)


def table_of(sweep: Sweep) -> list[tuple[str, Callable[[Level], str]]]:
    """Returns the columns of the terminal, with the most important metric: headings, and what writes them."""
    metric = most_important(metric_names(sweep.rows, ()))
    columns = []
    for column in COLUMNS:
        if column.terminal:
            columns.append((column.terminal, lambda level, column=column: column.write(column.of(level))))
        if metric and column.page == "Final loss":
            columns.append((heading_of(metric), lambda level: value_of(level.metrics.get(metric))))
    return columns


def value_of(distance: Distance | None) -> str:
    return four_digits(distance.value if distance else None)


def heading_of(metric: str) -> str:
    """Breaks the name of a metric into lines of 8 characters, two at least; words only if they are endless.

    >>> heading_of("val/top5_accuracy"), heading_of("f1"), heading_of("perplexity")
    ('val/\\ntop5_\\naccuracy', '\\nf1', '\\nperplexity')
    """
    split = metric.replace("_", "_ ").replace("/", "/ ")
    is_endless = max(map(len, split.split()), default=0) > LONGEST_WORD
    lines = textwrap.wrap(split, 8, break_long_words=is_endless) or [numbers.NOTHING]
    return "\n".join(line.replace(" ", "") for line in ["", *lines][-max(2, len(lines)) :][:4])


# ---- How it was measured ----

UNITS = {
    "seeds": "the standard deviation of O0 over the seeds",
    "steps": f"the standard error of O0's last {LAST_LOSSES} losses and the deviation of its last values",
    "runs": "how far autocast or a repeat of O0 went",
    "percent": f"{numbers.percent(GUESSED_SPREAD)} of O0's value",
}


def title(sweep: Sweep) -> str:
    """Says what was run, how often, and where."""
    settings, environment = sweep.settings, sweep.environment
    times = numbers.plural(settings.seeds, "seed") + (f" x {settings.repeat}" if settings.repeat > 1 else "")
    ranks = settings.nproc_per_node
    name = settings.script if ranks is None else f"{settings.script} on {numbers.plural(ranks, 'rank')}"
    device = environment.cpu or "cpu" if environment.device == "cpu" else environment.device
    return f"{name}: {times}, torch {environment.torch}, {device}"


def explain_columns(sweep: Sweep) -> str:
    """Says how the columns were measured, and from which distance on a level is worse."""
    memory = " or ".join(sorted({run.memory for run in sweep.records})) or "resident"
    text = (
        f"ms a step: median {explain_warmup(sweep)}, +- half the range between the quartiles. peak MiB: "
        f"{memory} memory. final loss: mean of the last {LAST_LOSSES}."
    )
    o0 = find_level(sweep.rows)
    known = [distance.unit for distance in (o0.loss, *o0.metrics.values()) if distance.spread] if o0 else []
    if not known:
        return text
    units = "; ".join(UNITS[unit] for unit in dict.fromkeys(known))
    worse = f"below -{numbers.short(TOLERANCE)} is worse, or unsure where one seed cannot tell."
    return f"{text} from O0: the loss or metric that did worst, in spreads ({units}); {worse}"


def explain_warmup(sweep: Sweep) -> str:
    """Says which steps the times are of, to be read after "median"."""
    # The first step has no time, whatever is left out.
    short = [run.steps - 1 <= WARMUP for run in sweep.records if run.step_ms is not None]
    if short and all(short):
        return "without the first half of so short a run"
    first = f"without the first {WARMUP} steps"
    return f"{first}, or the first half of a run too short for that" if any(short) else first


def part_of(value: float | None, values: Sequence[float | None]) -> float | None:
    """Returns the part that a value is of the largest one, None if it is none."""
    largest = max((one for one in values if one is not None), default=0)
    part = value / largest if value is not None and largest else None
    return round(part, 3) if part is not None and 0 <= part <= 1 else None
