"""Says what of earlier years a script died of, from the error and the line that it came from."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

from ampatch.apex.legacy.finding import ROOTS, ROWS, Finding, find_old, parse
from ampatch.apex.legacy.table import Old
from ampatch.apex.uses import Names, find_uses


def find_cause(error: Exception) -> Old | None:
    """Returns the row of what `--legacy` would have mended, None if the error is of something else."""
    rows = [row for row in ROWS.values() if row.error and row.error in str(error)]
    for path, line in reversed([*places(error)]):
        rows += [each.row for each in read_findings(path) if line in each.lines and not each.row.error]
    return next((row for row in rows if row.is_mended), None)


def places(error: Exception) -> Iterator[tuple[str, int | None]]:
    """Yields the file and line of each frame, and those of a syntax error."""
    yield from ((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename, error.lineno


def read_findings(path: str) -> tuple[Finding, ...]:
    """Lists what in a file breaks today; nothing if it cannot be read."""
    try:
        tree, findings = parse(Path(path).read_bytes(), path)
    except (OSError, SyntaxError, ValueError):
        return ()
    names = Names(tree, lambda _: (), ROOTS)
    return (*findings, *find_old(tree, names, find_uses(tree, names)))
