"""Reads what in a script breaks today, or needs CUDA, and in which lines, without running it."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampatch.apex.checking.uses import Names, Use, find_uses
from ampatch.apex.drop_in.mirror import ROOTS as APEX
from ampatch.apex.legacy import pattern_rows as rows
from ampatch.apex.legacy.name_rows import NAMES
from ampatch.apex.legacy.old import Old
from ampatch.apex.legacy.patterns import patterns, sampler_calls

ROOTS = APEX | {*(row.name.partition(".")[0] for row in NAMES), "librosa", "random", "torchvision", "yaml"}
ROWS = (*NAMES, *rows.PATTERNS)
# Handlers that mean: where this is gone, do something else.
FALLBACK = re.compile("ImportError|ModuleNotFoundError|AttributeError|NameError|TypeError|Exception")
ASKS = re.compile(r"version|hasattr", re.IGNORECASE)
ASKS_FOR_CUDA = re.compile(rf"{ASKS.pattern}|is_available|cuda|gpu", re.IGNORECASE)
READS_RANK = re.compile(r"[\"']LOCAL_RANK[\"']")  # which needs no option, then
KEYWORD = re.compile(rb"\basync(?=\s*=[^=])")


@dataclass(frozen=True, slots=True)
class OldLines:
    """A row of the table that a script meets, and the lines where."""

    row: Old
    lines: tuple[int, ...]


def parse(source: bytes, name: str) -> tuple[ast.Module, tuple[OldLines, ...]]:
    """Parses a script; one that says `async=` is read as today's Python would have it, and told of."""
    try:
        return ast.parse(source, name), ()
    except SyntaxError:
        mended, count = KEYWORD.subn(b"non_blocking", source)
        if not count:
            raise
        tree = ast.parse(mended, name)
    lines = (source.count(b"\n", 0, match.start()) + 1 for match in KEYWORD.finditer(source))
    return tree, (OldLines(rows.ASYNC, tuple(dict.fromkeys(lines))),)


def read(
    source: bytes, path: str, read_names: Callable[[ast.Module], Names]
) -> tuple[list[Use], tuple[OldLines, ...]]:
    """Returns the names that a script uses of apex and of other packages, and what in it is old."""
    tree, findings = parse(source, path)
    names = read_names(tree)
    uses = find_uses(tree, names)
    return uses, (*findings, *find_old(tree, names, uses))


def read_alone(tree: ast.Module) -> Names:
    """Returns the names in a script, but for what its own modules bring."""
    return Names(tree, lambda module, level: {}, ROOTS)


def find_cause(error: Exception) -> Old | None:
    """Returns the row of what `--legacy` would have mended, None if the error is of something else."""
    causes = [row for row in ROWS if row.error and row.error in str(error)]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    for path, line in reversed(places):
        with suppress(OSError, SyntaxError, ValueError):
            _, findings = read(Path(path).read_bytes(), path, read_alone)
            causes += [each.row for each in findings if line in each.lines and not each.row.error]
    return next((row for row in causes if row.is_mended), None)


def find_old(tree: ast.Module, names: Names, uses: Iterable[Use]) -> tuple[OldLines, ...]:
    """Lists what in a script breaks, warns or needs CUDA; what it asks about first is left out."""
    lines: dict[Old | None, list[int]] = defaultdict(list)
    for use in uses:
        if use.sure:
            lines[row_of(use.name)].append(use.line)
    for node in ast.walk(tree):
        for row in patterns(node, names):
            lines[row].append(node.lineno)
        lines[rows.SAMPLER] += [call.lineno for call in sampler_calls(node, names)]
        if isinstance(node, ast.Constant) and node.value == "LOCAL_RANK":  # which it reads as well, then
            lines.pop(rows.RANK, None)
    left = {row: tuple(sorted({*at}.difference(guarded_lines(tree, row)))) for row, at in lines.items()}
    return tuple(OldLines(row, left[row]) for row in ROWS if left.get(row))


def row_of(name: str) -> Old | None:
    """Returns the row of a name, or of what it is a part of, if the name is gone here."""
    named = (row for row in NAMES if f"{name}.".startswith(f"{row.name}."))
    return next((row for row in named if row.name.startswith("torch.") or is_gone(row.name)), None)


def is_gone(name: str) -> bool:
    """Whether what is installed has no such name.

    >>> is_gone("collections.abc.Iterable"), is_gone("time.clock")
    (False, True)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = pkgutil.resolve_name(name)
        except Exception:  # a package that does not fit torch raises whatever it likes
            return True
    return inspect.isgetsetdescriptor(found)  # by which NumPy 2.2 raises for methods that are gone


def guarded_lines(tree: ast.Module, row: Old | None) -> Iterator[int]:
    """Yields the lines that run only where a script has asked for such things, or that it falls back from."""
    asks = ASKS_FOR_CUDA if row is rows.CUDA else ASKS
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(is_fallback(each) for each in node.handlers):
            parts = node.body
        elif isinstance(node, (ast.If, ast.IfExp)) and asks.search(ast.unparse(node.test)):
            parts = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        else:
            continue
        for part in parts:
            yield from range(part.lineno, part.end_lineno + 1)


def is_fallback(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(FALLBACK.search(ast.unparse(handler.type)))
