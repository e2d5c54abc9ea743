"""Shows a sweep in the terminal: a progress bar while it runs, a table when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ampatch.sweeps.records.numbers import ASCII, duration, write_left
from ampatch.sweeps.records.sweep import Recommendation, Sweep, SweepRow, Verdict, abbreviate, keys_of
from ampatch.sweeps.terminal.caption import cut_middle, failure_of, printable, said_of_columns
from ampatch.sweeps.terminal.terminal_table import WIDTH, build_comparison, build_table
from ampatch.sweeps.verdicts.compare import Comparison

LONGEST_TITLE = 24


class ProgressBar:
    """The progress of a sweep: runs that are over, the steps that the present one has made, the time left.

    Where nobody watches it, in a log, it says a line for each run that is over instead.
    """

    def __init__(self, progress: Progress, total: int, limit: int | None = None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, steps="", left="")
        self._limit = "" if limit is None else f" of {limit}"
        self._name = ""
        self._started = time.monotonic()

    def add_runs(self, count: int) -> None:
        """Counts with so many runs more."""
        self._progress.update(self._task, total=self._progress.tasks[self._task].total + count)

    def start(self, name: str) -> None:
        """Shows which run is on."""
        self._name = name
        self._started = time.monotonic()
        text = printable(cut_middle(name, LONGEST_TITLE))
        self._progress.update(self._task, description=text, steps="")

    def show_steps(self, steps: int) -> None:
        """Shows how many steps the run has made, of how many if there is a limit."""
        self._progress.update(self._task, steps=f"step {steps}{self._limit}")

    def show_left(self, seconds: float | None) -> None:
        """Shows how long the rest of the sweep takes."""
        self._progress.update(self._task, left=write_left(seconds))

    def finish(self, outcome: str = "") -> None:
        """Counts a run as over; a log is told how it ended, if that is said."""
        self._progress.advance(self._task)
        console = self._progress.console
        if not outcome or console.is_terminal:
            return
        task = self._progress.tasks[self._task]
        took = duration(time.monotonic() - self._started)
        left = f", {task.fields['left']}" if task.fields["left"] and not task.finished else ""
        say(console, f"{self._name}: {outcome} after {took} ({task.completed:.0f} of {task.total:.0f}{left})")


@contextmanager
def progress_bar(console: Console, total: int, limit: int | None = None) -> Iterator[ProgressBar]:
    """Shows a bar for so many runs, of so many steps, while the block runs; it leaves nothing behind."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed} of {task.total} runs"),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, total, limit)


def say(console: Console, text: str) -> None:
    """Prints a line as it is; it is not broken, so that paths can be copied."""
    console.print(printable(text), soft_wrap=True, markup=False, highlight=False)


def tell(console: Console, text: str, *, style: str = "") -> None:
    """Prints a paragraph, broken at the width of the table."""
    width = min(console.width, WIDTH)
    console.print(printable(text), width=width, markup=False, highlight=False, style=style)


def show(console: Console, sweep: Sweep) -> None:
    """Prints the table, what its columns mean, why rows failed, and the recommendation."""
    keys = keys_of(row.name for row in sweep.rows)
    console.print(build_table(sweep), crop=False)
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


def said_of(row: SweepRow) -> str:
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
    console.print(build_comparison(comparison), crop=False)
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
