"""Does to the letter what advice says: another run of the script."""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from textwrap import dedent, indent

from ampatch.doctor.runs import Run
from ampatch.doctor.text.source import Source, place_of

NAMES = r"""(\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[, ])*\])"""  # a list, whose names may hold brackets
KEPT = re.compile(f"keep_fp32={NAMES}|for name in {NAMES}:")  # modules
WRITTEN = re.compile(r"write (-?)(\S+) in the place of \1(.+?), at (.+): ")  # a number
STARTED = re.compile(r"init_scale=2\.0\*\*(-?\d+)")
THERE = re.compile(r"where it is (?:used|made), at (.+):$")
INSTEAD = re.compile(r"# in the place of lines (\d+) to (\d+)\n")
TENTH = 0.1
Advice = tuple[str | None, str]  # for a line, "file:line"
Change = Callable[[list[str], int], list[str]]


def follow(run: Run, advice: Sequence[Advice]) -> Run | None:
    """Returns the run of a script that does what all of some advice says; None where that takes a reader."""
    changed: Run | None = run
    for where, each in sorted(advice, key=lambda it: -place_of(it[0])[1]):  # what is below does not move
        changed = changed and follow_one(changed, where, each)
    return changed


def follow_one(run: Run, where: str | None, advice: str) -> Run | None:
    """Returns the run that does what one piece says."""
    said, _, text = advice.partition("\n")
    if found := KEPT.search(advice):
        return replace(run, keep_fp32=(*run.keep_fp32, *ast.literal_eval(found[1] or found[2])))
    if found := re.search(r"opt_level (O\d)", said):
        return replace(run, level=found[1])
    if "lower the learning rate" in said:
        return replace(run, rate=run.rate * TENTH)
    if "dtype=torch.bfloat16" in said:
        return replace(run, bfloat16=True)
    if (found := STARTED.search(said)) and "scale the loss" not in said:
        return replace(run, init_scale=2.0 ** int(found[1]))
    edits = dict(run.edits)
    if found := WRITTEN.match(said):
        for place in found[4].split(" and "):
            edit(edits, place, lambda lines, line: write(lines, line, found[3], found[2]))
    elif text and (where := found[1] if (found := THERE.search(said)) else where):
        edit(edits, where, lambda lines, line: paste(lines, line, dedent(text), "stands above it" in said))
    return replace(run, edits=edits) if edits != run.edits else None


def edit(edits: dict[str, str], where: str, change: Change) -> None:
    """Changes a file at "file:line"; leaves it alone where it does not read as expected."""
    name, line = place_of(where)
    path = os.path.abspath(name)
    lines = edits[path].split("\n") if path in edits else lines_on_disk(path)
    if len(lines) >= line and (new := change(lines, line)) != lines:
        edits[path] = "\n".join(new)


def lines_on_disk(path: str) -> list[str]:
    """Returns the lines of a file, none of one that is not there, as of a script from the standard input."""
    return "".join(linecache.getlines(path)).split("\n")


def write(lines: list[str], line: int, old: str, new: str) -> list[str]:
    """Writes one number for another."""
    return [*lines[: line - 1], lines[line - 1].replace(old, new), *lines[line:]]


def paste(lines: list[str], line: int, text: str, is_function: bool) -> list[str]:
    """Pastes lines: decorators with the function that the line is in, or what replaces a statement."""
    if is_function:
        first = text.rpartition("\n")[2]
        found = [at for at, it in enumerate(lines[:line]) if it.strip() == first]
        begin, end = (found[-1], found[-1] + 1) if found else (0, 0)
    elif named := INSTEAD.match(text):
        begin, end = int(named[1]) - 1, int(named[2])
    else:
        statement = Source([f"{it}\n" for it in lines]).statement_at(line)
        begin, end = (statement.lineno - 1, statement.end_lineno) if statement else (0, 0)
    margin = lines[begin][: len(lines[begin]) - len(lines[begin].lstrip())]
    return [*lines[:begin], indent(text, margin), *lines[end:]] if end else lines


def unedited(run: Run, where: str | None) -> str | None:
    """Returns where "file:line" of an edited file stands in the file on the disk."""
    name, line = place_of(where)
    text = run.edits.get(os.path.abspath(name))
    if text is None:
        return where
    both = lines_on_disk(name), text.split("\n")
    for _, first, last, begin, end in SequenceMatcher(None, *both, False).get_opcodes():
        if begin < line <= end:
            return f"{name}:{min(first + line - begin, max(last, 1))}"
    return where


def joined(advice: Sequence[Advice]) -> str:
    """Returns advice that is to be followed together, as one text; of modules to keep one list."""
    found = [KEPT.search(each) for _, each in advice]
    if all(found):
        lists = [it[1] or it[2] for it in found if it]
        names = list(dict.fromkeys(name for each in lists for name in ast.literal_eval(each)))
        return advice[0][1].replace(lists[0], str(names)).replace("this module runs", "these modules run")
    (_, first), *rest = advice
    return "\n  and ".join([first, *(f"at {where}: {each}" for where, each in rest)])
