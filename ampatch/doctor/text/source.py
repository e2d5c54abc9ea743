"""The text of a file of the user's, which can be edited by its syntax tree."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from textwrap import dedent

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
PASTED = "\n     "  # before each line that is to be pasted
STATEMENT = "that statement alone in float32"
Edit = tuple[int, str, int]  # at a byte of the file, a text in the place of so many bytes
Lines = tuple[str, ...]


class Source:
    """The text of a file, which can be edited by its syntax tree; SyntaxError if it is no Python."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line.encode()))
        self.text = "".join(lines).encode()
        self.tree = ast.parse(self.text)

    def statement_at(self, line: int, kinds: tuple[type[ast.stmt], ...] = SIMPLE) -> ast.stmt | None:
        """Returns the innermost statement at a line, None where there is none of these kinds."""
        found = (it for it in ast.walk(self.tree) if isinstance(it, kinds))
        within = [it for it in found if it.lineno <= line <= (it.end_lineno or line)]
        return max(within, key=lambda it: it.lineno, default=None)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements in a row of which it is one."""
        blocks = (getattr(it, name, ()) for it in ast.walk(self.tree) for name in ("body", "orelse"))
        return next(it for it in blocks if isinstance(it, list) and statement in it)

    def line(self, number: int) -> str:
        """Returns a line without its margins."""
        return self.text.decode().split("\n")[number - 1].strip()

    def before(self, statement: ast.stmt) -> str:
        """Returns what stands before a statement on its line: `def forward(self, x):` of one in one line."""
        first = self._starts[statement.lineno - 1]
        return self.text[first : first + statement.col_offset].decode().strip()

    def begin(self, node: ast.expr) -> int:
        """Returns the first byte of an expression."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        """Returns the byte behind an expression."""
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def edited(self, statement: ast.stmt, edits: list[Edit], last: ast.stmt | None = None) -> Lines:
        """Returns the lines of a statement, or those up to a later one, with some edits."""
        first, end = self._starts[statement.lineno - 1], self._starts[(last or statement).end_lineno or 0]
        first += statement.col_offset if self.before(statement) else 0
        text = self.text[first:end]
        for at, new, length in sorted(edits, reverse=True):
            text = text[: at - first] + new.encode() + text[at - first + length :]
        return tuple(dedent(text.decode()).rstrip().split("\n"))


def pasted(region: Lines) -> str:
    """Returns lines that put a statement, or the function that it is in, into float32, with their title."""
    is_function = any(it.startswith("@") for it in region[:2])
    what = "that function in float32, by what stands above it here" if is_function else STATEMENT
    return PASTED.join((f"{what}:", *region))


def place_of(where: str | None) -> tuple[str, int]:
    """Returns the file and the line of "file:line"; "" and 0 of none."""
    path, _, line = (where or "").rpartition(":")
    return path, int(line or 0)


def read(path: str, names: dict[str, object] | None = None) -> Source | None:
    """Returns the text of a file, None if it is no Python; `names` are the globals of its module."""
    try:
        return Source(linecache.getlines(path, names))
    except SyntaxError:
        return None


def statement_of(where: str | None) -> tuple[Source, ast.stmt | None]:
    """Returns the file of "file:line", and the statement there, None where there is none."""
    path, line = place_of(where)
    source = read(path) or Source(())
    return source, source.statement_at(line)
