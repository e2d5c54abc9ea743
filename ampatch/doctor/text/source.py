"""The text of a file of the user's, and how some of its lines read when they are changed."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent, indent
from types import CodeType

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
PASTED = "\n     "  # before each line that is to be pasted
Edit = tuple[int, str, int]  # at a byte of the file, a text in the place of so many bytes
Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What stands in the place of the lines `first` to `last` of a file, which count from 1.

    `lines` have no margin: it is that of the first line. `path` is as it is shown.
    """

    path: str
    first: int
    last: int
    lines: Lines

    @property
    def file(self) -> str:
        return os.path.abspath(self.path)

    @property
    def where(self) -> str:
        return f"{self.path}:{self.first}"


def meets(one: Change, other: Change) -> bool:
    """Says whether two changes are of the same lines: they cannot both be made."""
    return one.file == other.file and one.first <= other.last and other.first <= one.last


def changed_texts(changes: Sequence[Change]) -> dict[str, str]:
    """Returns the texts of files, by path, with some changes, which do not meet."""
    texts: dict[str, list[str]] = {}
    for each in sorted(changes, key=lambda change: -change.first):  # what is above does not move
        lines = texts.setdefault(each.file, lines_on_disk(each.file))
        first = lines[each.first - 1]
        margin = first[: len(first) - len(first.lstrip())]
        lines[each.first - 1 : each.last] = indent("\n".join(each.lines), margin).split("\n")
    return {path: "\n".join(lines) for path, lines in texts.items()}


def line_before(changes: Sequence[Change], where: str | None) -> str | None:
    """Returns where "file:line" of a changed file stands in the file on the disk."""
    path, line = place_of(where)
    for each in sorted(changes, key=lambda change: change.first):
        if each.file != os.path.abspath(path) or line < each.first:
            continue
        if line < each.first + len(each.lines):
            line = each.first
            break
        line -= len(each.lines) - (each.last + 1 - each.first)
    return where if where is None else f"{path}:{line}"


def lines_on_disk(path: str) -> list[str]:
    """Returns the lines of a file, none of one that is not there, as of a script from the standard input."""
    return "".join(linecache.getlines(path)).split("\n")


class Source:
    """The text of a file, which can be edited by its syntax tree; SyntaxError if it is no Python."""

    def __init__(self, lines: Sequence[str], path: str = "") -> None:
        self.path = path
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line.encode()))
        self.text = "".join(lines).encode()
        self.tree = ast.parse(self.text)

    def statements_at(self, line: int, kinds: tuple[type[ast.stmt], ...] = SIMPLE) -> list[ast.stmt]:
        """Returns the innermost statements of these kinds at a line: several may stand on one."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, kinds))
        within = [node for node in nodes if node.lineno <= line <= (node.end_lineno or line)]
        latest = max((node.lineno for node in within), default=0)
        return [node for node in within if node.lineno == latest]

    def statement_at(self, line: int, kinds: tuple[type[ast.stmt], ...] = SIMPLE) -> ast.stmt | None:
        """Returns the first of the statements at a line, None where there is none of these kinds."""
        return next(iter(self.statements_at(line, kinds)), None)

    def statement_of(self, code: CodeType, instruction: int, line: int) -> ast.stmt | None:
        """Returns the statement at a line that an instruction belongs to, as Python 3.11 and later tell."""
        statements = self.statements_at(line)
        if len(statements) > 1 and hasattr(code, "co_positions"):
            place = list(code.co_positions())[instruction // 2]
            here = (place[0] or line, place[2] or 0)
            within = [node for node in statements if (node.lineno, node.col_offset) <= here]
            return within[-1] if within else statements[0]
        return next(iter(statements), None)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements in a row of which it is one."""
        blocks = (getattr(node, name, ()) for node in ast.walk(self.tree) for name in ("body", "orelse"))
        holding = (block for block in blocks if isinstance(block, list) and statement in block)
        return next(holding, [statement])

    def line(self, number: int) -> str:
        return self.text.decode().split("\n")[number - 1].strip()

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Returns the byte behind an expression."""
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def text_of(self, statement: ast.stmt, edits: Sequence[Edit] = ()) -> Lines:
        """Returns the lines of a statement alone, with some edits, without their margin."""
        margin = self.text[self._starts[statement.lineno - 1] : self.begin(statement)].decode()
        text = self._edited(self.begin(statement), self.end(statement), edits)
        return tuple(dedent((margin if margin.isspace() else "") + text).split("\n"))

    def _edited(self, begin: int, end: int, edits: Sequence[Edit]) -> str:
        text = self.text[begin:end]
        for at, new, length in sorted(edits, reverse=True):
            text = text[: at - begin] + new.encode() + text[at - begin + length :]
        return text.decode()

    def edited(self, statement: ast.stmt, edits: Sequence[Edit], last: ast.stmt | None = None) -> Change:
        """Returns the change of the lines of a statement, or of those up to a later one, by some edits."""
        end = (last or statement).end_lineno or 0
        text = self._edited(self._starts[statement.lineno - 1], self._starts[end], edits)
        return self.change(statement.lineno, end, tuple(dedent(text).rstrip().split("\n")))

    def edited_line(self, line: int, edits: Sequence[Edit]) -> Change:
        """Returns the change of a line by some edits."""
        text = self._edited(self._starts[line - 1], self._starts[line], edits)
        return self.change(line, line, (text.strip(),))

    def replaced(self, statement: ast.stmt, lines: Lines) -> Change:
        """Returns the change that puts lines in the place of one statement.

        What else stands on its line gets lines of its own: `def f(x):` before it, statements beside it.
        """
        block, first, last = self.block_of(statement), statement.lineno, statement.end_lineno or 0
        beside = [
            statement
            for statement in block
            if statement.lineno <= last and (statement.end_lineno or 0) >= first
        ]
        first, last = beside[0].lineno, beside[-1].end_lineno or 0
        header = self.text[self._starts[first - 1] : self.begin(beside[0])].decode().strip()
        parts = [lines if node is statement else self.text_of(node) for node in beside]
        body = [line for part in parts for line in part]
        return self.change(
            first, last, (header, *indent("\n".join(body), "    ").split("\n")) if header else tuple(body)
        )

    def change(self, first: int, last: int, lines: Lines) -> Change:
        return Change(self.path, first, last, lines)


def place_of(where: str | None) -> tuple[str, int]:
    """Returns the file and the line of "file:line"; "" and 0 of none."""
    path, _, line = (where or "").rpartition(":")
    return path, int(line or 0)


def read(path: str, names: dict[str, object] | None = None, shown: str = "") -> Source | None:
    """Returns the text of a file, None if it is no Python; `names` are the globals of its module."""
    try:
        return Source(linecache.getlines(path, names), shown or path)
    except SyntaxError:
        return None


def statements_of(where: str | None) -> tuple[Source, Iterator[ast.stmt]]:
    """Returns the file of "file:line", and the statements there."""
    path, line = place_of(where)
    source = read(path) or Source((), path)
    return source, iter(source.statements_at(line))


def is_running_sum(where: str | None) -> bool:
    """Says whether a statement at a line adds to what it assigns to, as `total = total + x` does."""
    for statement in statements_of(where)[1]:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = ast.unparse(statement.targets[0])
            added = (node for node in ast.walk(statement.value) if isinstance(node, (ast.BinOp, ast.Call)))
            if any(target in map(ast.unparse, ast.iter_child_nodes(node)) for node in added):
                return True
    return False


def statement_of(where: str | None) -> tuple[Source, ast.stmt | None]:
    """Returns the file of "file:line", and the first statement there, None where there is none."""
    source, statements = statements_of(where)
    return source, next(statements, None)
