"""Reads the end of what a script printed, and says in a line what it raised."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

LINES = 20
LONGEST_LINE = 500
TAIL_BYTES = 2**16
# Colours and cursor movements, as tqdm and rich write them.
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


def last_lines(path: Path) -> tuple[str, ...]:
    """Returns the last lines of a log as a terminal would show them, without empty ones at the end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return lines_of(file.read().decode(errors="replace"))
    except OSError:
        return ()


def lines_of(text: str) -> tuple[str, ...]:
    """Returns the last lines of a text as a terminal would show them, without empty ones at the end."""
    lines = [shown(line) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-LINES:])


def shown(line: str) -> str:
    r"""Returns what is left of a line that was written over, as progress bars do.

    >>> shown("10 %\r\x1b[32m90 %\x1b[0m \r")
    '90 %'
    """
    parts = [part.rstrip() for part in ESCAPES.sub("", line).split("\r")]
    return next((part for part in reversed(parts) if part), "")[:LONGEST_LINE]


def line_of(error: BaseException) -> str:
    r"""Returns the line of a traceback that names an exception, with the first line of its message.

    >>> line_of(ValueError("bad weights\nin layer 3"))
    'ValueError: bad weights'
    """
    lines = "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    # Of a SyntaxError the place comes before, indented.
    first = next((line for line in lines if line[:1].strip()), "")
    # What other processes raised is told below an empty line, and its end says most.
    return shown(lines[-1] if first.endswith(": ") else first).strip()
