"""Says which names of apex that a script uses are provided, and what in it breaks today."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ampatch
import ampatch as amp
import ampatch.apex
from ampatch.apex.checking.imports import Modules
from ampatch.apex.checking.uses import Use, is_of
from ampatch.apex.drop_in.mirror import EXTENSIONS, OURS, PARTS, ROOTS, own_name
from ampatch.apex.drop_in.missing import explain
from ampatch.apex.drop_in.real import public_names
from ampatch.apex.legacy import pattern_rows as rows
from ampatch.apex.legacy.finding import READS_RANK, OldLines, read
from ampatch.apex.legacy.old import BREAKS

# In Python's words for a syntax error.
PYTHON_2 = ("call to 'print'", "call to 'exec'", "multiple exception types", "leading zeros in decimal")
LINE_OF_PYTHON_2 = re.compile(r"^\s*(raise \w+, |exec [\"'\w]|print >>)|\bur[\"']|\b\d+L\b|<>")


@dataclass(frozen=True, slots=True)
class UsedName:
    """A name of apex, the lines of a script that use it, and why it is not provided, if so."""

    name: str
    lines: tuple[int, ...]
    fault: str | None


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The names of apex that one script uses, and what else it says that is of earlier years."""

    path: Path
    names: tuple[UsedName, ...]
    findings: tuple[OldLines, ...] = ()
    reads_rank: bool = False  # from LOCAL_RANK

    def without_rank(self) -> ScriptReport:
        """Leaves out the option for the rank, where another file of the script reads LOCAL_RANK."""
        left = (finding for finding in self.findings if finding.row is not rows.RANK)
        return dataclasses.replace(self, findings=tuple(left))

    @property
    def missing(self) -> tuple[UsedName, ...]:
        return tuple(name for name in self.names if name.fault)

    @property
    def broken(self) -> tuple[OldLines, ...]:
        """What breaks on the torch, NumPy and Python that are installed."""
        return tuple(finding for finding in self.findings if finding.row.status == BREAKS)


def check_file(path: Path, modules: Modules | None = None) -> ScriptReport:
    """Reads a script, or one of its modules; raises AmpValueError if Python could not read it either."""
    if path.suffix == ".ipynb":  # which is an expression of Python's as well
        raise amp.AmpValueError(f"'{path}' is a notebook: expected a Python script, so export it as one")
    try:
        read_names = functools.partial((modules or Modules(path, star_names)).names, path)
        source = path.read_bytes()
        uses, findings = read(source, str(path), read_names)
    except OSError as error:
        raise amp.AmpValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"'{path}', line {line}" if line else f"'{path}'"
        raise amp.AmpValueError(f"{place}: {getattr(error, 'msg', error)}; {expected_of(error)}") from None
    lines: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for use in uses:
        judged = judge(use) if is_of(use.name, ROOTS) else None
        if judged is not None:
            lines[judged].append(use.line)
    names = (UsedName(name, tuple(dict.fromkeys(at)), fault) for (name, fault), at in lines.items())
    reads_rank = bool(READS_RANK.search(source.decode("latin-1")))
    return ScriptReport(path, tuple(sorted(names, key=lambda name: name.name)), findings, reads_rank)


def expected_of(error: SyntaxError | ValueError) -> str:
    """Says what to do about a file that is not in the language of this Python."""
    said, line = str(getattr(error, "msg", error)), getattr(error, "text", None) or ""
    if isinstance(error, TabError):
        return "no Python 3 takes tabs and spaces mixed like this: expand the tabs in your editor"
    if any(word in said for word in PYTHON_2) or LINE_OF_PYTHON_2.search(line):
        return "this is Python 2: convert it by 2to3, which Python 3.12 still has"
    version = ".".join(map(str, sys.version_info[:2]))
    return f"expected a script that Python {version} can parse: mend the line, or leave the file out"


def star_names(module: str) -> tuple[str, ...]:
    """Returns what `from module import *` brings."""
    _, own, rest = walk(module)
    is_ours = isinstance(own, ModuleType) and not rest
    return tuple(name for name, _ in public_names(own.__name__)) if is_ours else ()


def judge(use: Use) -> tuple[str, str | None] | None:
    """Returns the name that a use is of, and why it is not provided, if so; None if nobody can say."""
    known, value, rest = walk(use.name)
    if not rest:
        return known, None
    fault = explain(use.name)
    if fault is None and use.sure:
        close = difflib.get_close_matches(rest[0], dir(value), 1)
        fault = f"{known} has no {rest[0]!r}" + "".join(f"; close: {each}" for each in close)
    return (use.name, fault) if fault else None


def walk(name: str) -> tuple[str, object, tuple[str, ...]]:
    """Follows a name as far as it goes: returns that part, what it stands for, and what is left."""
    first, *rest = name.split(".")
    if first in EXTENSIONS:
        return follow(first, importlib.import_module(own_name(first)), tuple(rest))
    if first == "apex":
        return follow(first, ampatch.apex, tuple(rest))
    return first, None, (first,)


def follow(known: str, value: object, rest: tuple[str, ...]) -> tuple[str, object, tuple[str, ...]]:
    """Follows what is left of a name, from what the part before stands for."""
    if not rest or is_special(rest[0]) or not can_look_into(value):
        return known, value, ()
    # `apex.amp._amp_state` is an object, and in `from apex.amp._amp_state import ...` a module.
    ways = [follow(f"{known}.{rest[0]}", each, rest[1:]) for each in step(value, rest[0])]
    return min(ways, key=lambda way: (len(way[2]), -len(way[0])), default=(known, value, rest))


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def can_look_into(value: object) -> bool:
    """Says whether the attributes of a value can be told: those of modules and of our classes."""
    return isinstance(value, ModuleType) or (isinstance(value, type) and value.__module__.startswith(OURS))


def step(value: object, name: str) -> Iterator[object]:
    """Yields what an attribute stands for, and a submodule of that name."""
    if value is ampatch.apex:
        if name in PARTS:
            yield importlib.import_module(own_name(f"apex.{name}"))
        return
    if name in vars(value) or (isinstance(value, type) and hasattr(value, name)):
        yield getattr(value, name)
    if isinstance(value, ModuleType) and hasattr(value, "__path__"):
        whole = f"{value.__name__}.{name}"
        if importlib.util.find_spec(whole) is not None:
            yield importlib.import_module(whole)
