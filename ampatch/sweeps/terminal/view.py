"""Shows a sweep in the terminal: a progress bar while it runs, a table when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ampatch.sweeps.records.numbers import ASCII, duration
from ampatch.sweeps.records.row_names import abbreviate, keys_of
from ampatch.sweeps.records.sweep import Recommendation, Row, Sweep, Verdict
from ampatch.sweeps.terminal.caption import failure_of, said_of_columns
from ampatch.sweeps.terminal.plain import cut_middle, printable
from ampatch.sweeps.terminal.terminal_table import WIDTH, build_comparison, build_table
from ampatch.sweeps.verdicts.compare import Comparison

LONGEST_TITLE = 24


class Bar:
    """The progress of a sweep: runs that are over, the steps that the present one has made, the time left.

    Where nobody watches it, in a log, it says a line for each run that is over instead.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, steps="", left="")
        self._name = ""
        self._started = time.monotonic()

    def start(self, name: str) -> None:
        """Shows which run is on."""
        self._name = name
        self._started = time.monotonic()
        text = printable(cut_middle(self._name, LONGEST_TITLE), self._progress.console.encoding)
        self._progress.update(self._task, description=text, steps="")

    def show_steps(self, steps: int, of: int | None = None) -> None:
        """Shows how many steps the run has made, of how many if that is known."""
        self._progress.update(self._task, steps=f"step {steps}" + (f" of {of}" if of else ""))

    def show_time_left(self, seconds: float | None) -> None:
        """Shows how long the sweep will go on, None where that is not known."""
        left = "" if seconds is None else f"{duration(seconds)} left"
        self._progress.update(self._task, left=left)

    def finish(self, outcome: str = "") -> None:
        """Counts a run as over; a log is told how it ended, if that is said."""
        self._progress.advance(self._task)
        console = self._progress.console
        if not outcome or console.is_terminal:
            return
        task = self._progress.tasks[self._task]
        took = duration(time.monotonic() - self._started)
        say(console, f"{self._name}: {outcome} after {took} ({task.completed:.0f} of {task.total:.0f})")


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Bar]:
    """Shows a bar for so many runs while the block runs; it leaves nothing behind."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed} of {task.total} runs"),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield Bar(progress, total)


def say(console: Console, text: str) -> None:
    """Prints a line as it is; it is not broken, so that paths can be copied."""
    console.print(printable(text, console.encoding), soft_wrap=True, markup=False, highlight=False)


def tell(console: Console, text: str, *, style: str = "") -> None:
    """Prints a paragraph, broken at the width of the table."""
    width = min(console.width, WIDTH)
    console.print(printable(text, console.encoding), width=width, markup=False, highlight=False, style=style)


def show(console: Console, sweep: Sweep) -> None:
    """Prints the table, what its columns mean, why rows failed, and the recommendation."""
    keys = keys_of(row.name for row in sweep.rows)
    width = min(console.width, WIDTH)
    console.print(build_table(sweep, encoding=console.encoding, width=width), crop=False)
    show_legend(console, keys)
    for row in sweep.rows:
        if said := said_of(row):
            tell(console, f"{keys[row.name]} {said}")
    for record in sweep.records:
        if record.failed:
            say(console, failure_of(record, keys[record.row]))
    console.print()
    tell(console, said_of_columns(sweep), style="dim")
    console.print()
    tell(console, said_of_choice(sweep.recommendation, keys), style="bold")


def show_legend(console: Console, keys: Mapping[str, str]) -> None:
    """Prints the names that are not in the table for their length."""
    for name, key in keys.items():
        if name != key:
            tell(console, f"{key}: {name}")


def said_of(row: Row) -> str:
    """Writes a verdict with its reason; nothing where the lines of its runs that failed say as much."""
    if not row.reason or not row.runs or row.verdict is Verdict.FAILED or row.failed == row.runs:
        return ""
    return f"{'unknown' if row.verdict is Verdict.UNKNOWN else row.verdict}: {row.reason}"


def said_of_choice(it: Recommendation, keys: Mapping[str, str]) -> str:
    """Writes the recommendation; variants have their whole name once."""
    reason = abbreviate(it.reason, keys)
    if it.row is None:
        return f"Nothing is recommended. {reason}"
    key = keys.get(it.row, it.row)
    return f"Recommended: {it.row}{'' if key == it.row else f' ({key})'}. {reason}"


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Prints which two sweeps these are, both side by side, in what else they differ, and what got worse."""
    keys = keys_of(change.name for change in comparison.rows)
    for side, name in zip(("before", "after"), comparison.sides, strict=True):
        tell(console, f"{side}: {name}")
    console.print()
    width = min(console.width, WIDTH)
    console.print(build_comparison(comparison, encoding=console.encoding, width=width), crop=False)
    show_legend(console, keys)
    for line in [*comparison.notes, *comparison.gaps]:
        tell(console, abbreviate(line, keys))
    for sentence in comparison.regressions or [praise_of(comparison)]:
        tell(console, abbreviate(sentence, keys), style="bold")


def praise_of(comparison: Comparison) -> str:
    """Says that nothing got worse, and what was allowed."""
    limits = comparison.limits
    spreads = f"{ASCII.short(limits.tolerance)} spreads"
    memory = "" if limits.more_memory is None else f", {ASCII.percent(limits.more_memory)} more memory"
    return (
        "No level got worse by more than is allowed: "
        f"{ASCII.percent(limits.slower)} slower, {spreads} less accurate{memory}."
    )
