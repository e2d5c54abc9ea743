"""A sweep in the terminal: a line for each run while it goes on, a table when it is over."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from ampatch import AmpError
from ampatch.sweeps.campaign import SweepProgress
from ampatch.sweeps.rows import (
    Ending,
    Level,
    Outcome,
    Recommendation,
    Run,
    Sweep,
    Verdict,
    abbreviate,
    keys_of,
)
from ampatch.sweeps.show.columns import said_of_columns, table_of, title
from ampatch.tools.numbers import duration, write_left

WIDTH = 80
HEADLINES = {
    Outcome.TAKE: "Recommended: ",
    Outcome.STAY: "Recommended: ",
    Outcome.UNKNOWN: "Nothing is recommended.",
}


class Printer:
    """Prints on a stream that may fail, as a full disk does: nothing after its first error."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __call__(self, text: str) -> None:
        """Prints lines, with what the encoding of the stream does not have in escapes."""
        if self._stream is None or self._error is not None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            self._error = error
            with suppress(OSError):  # of a stream that is no file
                # What the stream still holds is flushed when Python ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def raise_error(self) -> None:
        """Raises BrokenPipeError if nobody read what was written, AmpError if it failed in another way."""
        if isinstance(self._error, BrokenPipeError):
            raise self._error
        if self._error is not None:
            raise AmpError(f"the table could not be printed: {self._error.strerror}")


def show_progress(say: Printer) -> Callable[[SweepProgress], None]:
    """Returns what says a line for each run that is over."""

    def show(now: SweepProgress) -> None:
        if now.record is None:
            return
        left = f", {write_left(now.left)}" if now.left and now.done < now.total else ""
        took = duration(now.record.seconds)
        say(printable(f"{now.name}: {now.record.outcome} after {took} ({now.done} of {now.total}{left})"))

    return show


def write(sweep: Sweep) -> str:
    """Returns the table, what its columns mean, why rows failed, and the recommendation."""
    keys = keys_of(row.name for row in sweep.rows)
    lines = [title(sweep), *table_lines(sweep, keys)]
    lines += wrap(*(f"{key}: {name}" for name, key in keys.items() if name != key))
    lines += wrap(*said_of_rows(sweep.rows, keys))
    lines += [failure_of(run, keys[run.row]) for run in sweep.records if run.failed]
    lines += ["", *wrap(said_of_columns(sweep)), "", *wrap(said_of_choice(sweep.recommendation, keys))]
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
    """Writes the verdict about a level."""
    return row.verdict.value if row.runs else "not run"


def said_of_rows(rows: Sequence[Level], keys: Mapping[str, str]) -> list[str]:
    """Returns what is to be said of rows, each text once, after the short names of those it is about."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for text in said_of(row):
            texts.setdefault(text, []).append(keys[row.name])
    return [f"{', '.join(names)} {text}" for text, names in texts.items()]


def said_of(row: Level) -> Iterator[str]:
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


def said_of_choice(it: Recommendation, keys: Mapping[str, str]) -> str:
    """Writes the recommendation; variants have their whole name once."""
    reason = abbreviate(it.reason, keys)
    if it.row is None:
        return f"{HEADLINES[it.outcome]} {reason}"
    key = keys.get(it.row, it.row)
    return f"{HEADLINES[it.outcome]}{it.row}{'' if key == it.row else f' ({key})'}. {reason}"


def printable(text: str) -> str:
    """Escapes what a terminal would obey, and halves of characters, which no encoding can write.

    >>> print(printable("caf\\u00e9 \\x1b[31m"))
    café \\x1b[31m
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
