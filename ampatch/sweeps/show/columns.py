"""The columns of a sweep: what each shows of a level, in the terminal and on the page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampatch.sweeps.judge.metric_names import most_important
from ampatch.sweeps.judge.statistics import GUESSED_SPREAD
from ampatch.sweeps.rows import LAST_LOSSES, Distance, Level, Sweep, find_level, metric_names
from ampatch.tools.numbers import ASCII, TYPESET, Alphabet

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
    write: Callable[[Alphabet, float | None], str] = Alphabet.number
    small: Callable[[Level], str] = lambda level: ""
    has_bar: bool = False


def half_range(level: Level) -> float | None:
    """Returns half of the range between the quartiles of a step's time; a single time has no range."""
    return (level.step_ms_high - level.step_ms_low) / 2 if level.timed > 1 else None


def worst(level: Level) -> float | None:
    """Returns the distance of that loss or metric which did worst, in spreads: the verdict goes by it."""
    known = [it.spreads for it in (level.loss, *level.metrics.values()) if it.spreads is not None]
    return min(known, default=None)


def two_digits(alphabet: Alphabet, value: float | None) -> str:
    """Writes two digits that count."""
    return alphabet.number(value, 2)


def four_digits(alphabet: Alphabet, value: float | None) -> str:
    """Writes four digits that count."""
    return alphabet.number(value, 4)


def quartiles(level: Level) -> str:
    """Writes between which times the middle half of the steps lies."""
    span = f"{TYPESET.number(level.step_ms_low)}–{TYPESET.number(level.step_ms_high)}"  # noqa: RUF001
    return span if level.timed > 1 else ""


def distance_text(distance: Distance) -> str:
    """Writes how far a value is from that of O0; nothing for O0 itself."""
    if distance.spreads is None:
        return ""
    if distance.unit != "percent" or not distance.baseline or distance.spread is None:
        return f"{TYPESET.signed(distance.spreads)} spreads"
    percent = 100 * distance.spreads * (distance.spread / abs(distance.baseline))
    return f"{TYPESET.signed(percent)} %" if math.isfinite(percent) else ""


COLUMNS = (
    Column("ms a\nstep", "ms a step", lambda it: it.step_ms, four_digits, quartiles),
    Column("\n+-", "", half_range, two_digits),
    Column("speed\nto O0", "Speed", lambda it: it.speed, Alphabet.ratio, has_bar=True),
    Column(
        *("peak\nMiB", "Peak MiB", lambda it: it.peak_mib),
        small=lambda it: "" if it.memory is None else f"{TYPESET.ratio(it.memory)} O0",
        has_bar=True,
    ),
    Column("", "Kept MiB", lambda it: it.kept_mib, has_bar=True),
    Column(
        *("final\nloss", "Final loss", lambda it: it.loss.value, four_digits),
        lambda it: distance_text(it.loss),
    ),
    Column("from\nO0", "", worst, Alphabet.signed),
    Column("skip-\nped", "Skipped", lambda it: it.skipped, Alphabet.count),
    Column("loss\nscale", "Loss scale", lambda it: it.loss_scale, Alphabet.scale),
)


def table_of(sweep: Sweep) -> list[tuple[str, Callable[[Level], str]]]:
    """Returns the columns of the terminal, with the most important metric: headings, and what writes them."""
    metric = most_important(metric_names(sweep.rows, ()))
    columns = []
    for column in COLUMNS:
        if column.terminal:
            columns.append((column.terminal, lambda it, column=column: column.write(ASCII, column.of(it))))
        if metric and column.page == "Final loss":
            columns.append((heading_of(metric), lambda it: value_of(it.metrics.get(metric))))
    return columns


def value_of(distance: Distance | None) -> str:
    """Writes a value in four digits."""
    return ASCII.number(distance.value if distance else None, 4)


def heading_of(metric: str) -> str:
    """Breaks the name of a metric into lines of 8 characters, two at least; words only if they are endless.

    >>> heading_of("val/top5_accuracy"), heading_of("f1"), heading_of("perplexity")
    ('val/\\ntop5_\\naccuracy', '\\nf1', '\\nperplexity')
    """
    split = metric.replace("_", "_ ").replace("/", "/ ")
    is_endless = max(map(len, split.split()), default=0) > LONGEST_WORD
    lines = textwrap.wrap(split, 8, break_long_words=is_endless) or [ASCII.nothing]
    return "\n".join(line.replace(" ", "") for line in ["", *lines][-max(2, len(lines)) :][:4])


# ---- How it was measured ----

UNITS = {
    "seeds": "the standard deviation of O0 over the seeds",
    "steps": f"the standard error of O0's last {LAST_LOSSES} losses and the deviation of its last values",
    "runs": "how far autocast or a repeat of O0 went",
    "percent": f"{ASCII.percent(GUESSED_SPREAD)} of O0's value",
}


def title(sweep: Sweep) -> str:
    """Says what was run, how often, and where."""
    settings, environment = sweep.settings, sweep.environment
    times = ASCII.plural(settings.seeds, "seed") + (f" x {settings.repeat}" if settings.repeat > 1 else "")
    ranks = settings.nproc_per_node
    name = settings.script if ranks is None else f"{settings.script} on {ASCII.plural(ranks, 'rank')}"
    device = environment.cpu or "cpu" if environment.device == "cpu" else environment.device
    return f"{name}: {times}, torch {environment.torch}, {device}"


def said_of_columns(sweep: Sweep) -> str:
    """Says how the columns were measured, and from which distance on a level is worse."""
    memory = " or ".join(sorted({run.memory for run in sweep.records})) or "resident"
    said = (
        f"ms a step: median {said_of_warmup(sweep)}, +- half the range between the quartiles. peak MiB: "
        f"{memory} memory. final loss: mean of the last {LAST_LOSSES}."
    )
    o0 = find_level(sweep.rows)
    known = [it.unit for it in (o0.loss, *o0.metrics.values()) if it.spread] if o0 else []
    if not known:
        return said
    units = "; ".join(UNITS[unit] for unit in dict.fromkeys(known))
    worse = f"below -{ASCII.short(sweep.settings.tolerance)} is worse, or unsure where one seed cannot tell."
    return f"{said} from O0: the loss or metric that did worst, in spreads ({units}); {worse}"


def said_of_warmup(sweep: Sweep) -> str:
    """Says which steps the times are of, to be read after "median"."""
    warmup = sweep.settings.warmup
    # The first step has no time, whatever is left out.
    short = [run.steps - 1 <= warmup for run in sweep.records if run.step_ms is not None]
    if warmup == 0:
        return "of all steps"
    if short and all(short):
        return "without the first half of so short a run"
    first = "without the first step" if warmup == 1 else f"without the first {warmup} steps"
    return f"{first}, or the first half of a run too short for that" if any(short) else first


def part_of(value: float | None, values: Sequence[float | None]) -> float | None:
    """Returns the part that a value is of the largest one, None if it is none."""
    largest = max((it for it in values if it is not None), default=0)
    part = value / largest if value is not None and largest else None
    return round(part, 3) if part is not None and 0 <= part <= 1 else None
