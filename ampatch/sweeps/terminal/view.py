"""Shows a sweep in the terminal: a progress bar while it runs, a table when it is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ampatch.sweeps.campaign import SweepProgress
from ampatch.sweeps.columns import LIMITED
from ampatch.sweeps.records.sweep import Recommendation, Sweep, SweepRow, Verdict, abbreviate, keys_of
from ampatch.sweeps.terminal.caption import cut_middle, failure_of, printable, said_of_columns
from ampatch.sweeps.terminal.terminal_table import WIDTH, build_comparison, build_table
from ampatch.sweeps.verdicts.compare import Comparison
from ampatch.tools.numbers import ASCII, duration, write_left

LONGEST_TITLE = 24


class ProgressBar:
    """The progress of a sweep: runs that are over, the steps that the present one has made, the time left.

    Where nobody watches it, in a log, it says a line for each run that is over instead.
    """

    def __init__(self, progress: Progress, total: int, limit: int | None = None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, steps="", left="")
        self._limit = "" if limit is None else f" of {limit}"

    def __call__(self, now: SweepProgress) -> None:
        """Shows how far it is; a log is told of the runs that are over."""
        left = write_left(now.left)
        steps = f"step {now.steps}{self._limit}" if now.steps else ""
        shown = {"description": printable(cut_middle(now.name, LONGEST_TITLE)), "steps": steps, "left": left}
        self._progress.update(self._task, completed=now.done, total=now.total, **shown)
        if now.record is None or self._progress.console.is_terminal:
            return
        took = duration(now.record.seconds)
        rest = f", {left}" if left and now.done < now.total else ""
        line = f"{now.name}: {now.record.outcome} after {took} ({now.done} of {now.total}{rest})"
        say(self._progress.console, line)


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
        if row.note:
            tell(console, f"{keys[row.name]} {row.note}")
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
    slower, *others = (
        f"{ASCII.percent(part)} {it.limit.fault}"
        for it in LIMITED
        if (part := limits.parts[it.limit.option]) is not None
    )
    return (
        "No level got worse by more than is allowed: "
        f"{', '.join([slower, f'{spreads} less accurate', *others])}."
    )
