"""`ampatch check`: lists the names of apex that scripts use, what of it breaks today, and what to do."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import importlib.util
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ampatch.apex
from ampatch import AmpError, AmpValueError
from ampatch.apex.drop_in import (
    EXTENSIONS,
    OURS,
    PARTS,
    ROOTS,
    apex_name,
    is_real_installed,
    own_name,
    public_names,
)
from ampatch.apex.legacy import rows
from ampatch.apex.legacy.patterns import READS_RANK, OldLines, parse, read
from ampatch.apex.legacy.patterns import ROOTS as LEGACY
from ampatch.apex.legacy.rows import BREAKS, MAY_BREAK, NEEDS_CUDA, WARNS
from ampatch.apex.legacy.source_names import Names, Use, is_of
from ampatch.apex.missing import explain

SUMMARY = "list what a script uses from apex, what breaks today or needs CUDA, and what to do about it"
# Of how many in all.
WORDS = {BREAKS: "broken today", MAY_BREAK: "perhaps", WARNS: "with a warning", NEEDS_CUDA: "for CUDA"}
# In Python's words for a syntax error.
PYTHON_2 = ("call to 'print'", "call to 'exec'", "multiple exception types", "leading zeros in decimal")
LINE_OF_PYTHON_2 = re.compile(r"^\s*(raise \w+, |exec [\"'\w]|print >>)|\bur[\"']|\b\d+L\b|<>")
MAKES_BYTES = re.compile(rb"\.byte\(\)|torch\.uint8|ByteTensor")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch check` accepts."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a script (and what it imports from its folder), or a folder"
    )
    parser.epilog = (
        "Nothing is run. The exit status is 1 if ampatch lacks a name of apex, or if something breaks today."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a report for each script; returns 1 if one of them uses what is not provided or breaks."""
    files: dict[Path, tuple[Path, Modules]] = {}
    for path in map(Path, arguments.paths):
        if not path.exists():
            raise AmpValueError(f"'{path}' does not exist: expected a Python script or a folder")
        modules = Modules(path)
        for file in modules.files:
            files.setdefault(file.resolve(), (file, modules))
    asked_for = {Path(path).resolve() for path in arguments.paths}
    reports, faults, skipped = [], [], []
    for place, (file, modules) in files.items():
        try:
            reports.append(check_file(file, modules))
        except AmpError as error:  # of a file that is imported: it may be for another Python
            (faults if asked_for & {place, *place.parents} else skipped).append(error)
    show(reports)
    for error in skipped:
        print(f"not checked: {error}")
    if is_real_installed():
        print("apex is installed: what it still has can be used as well, whatever the list above says")
    sys.stdout.flush()
    if faults:
        more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        raise AmpValueError(f"{faults[0]}{more}")
    return int(any(report.missing or report.broken for report in reports))


def show(reports: Sequence[ScriptReport]) -> None:
    """Prints the names of each script, and how many there are in all."""
    for report in reports:
        if report.names or report.findings:
            print(report.path, *table(report), sep="\n")
    missing = {name.name for report in reports for name in report.missing}
    names = {name.name for report in reports for name in report.names}
    kinds = Counter(finding.row.status for report in reports for finding in report.findings)
    print(
        f"{count(len(reports), 'script')}, {count(len(names), 'name')} of apex, {len(missing)} not provided"
        + "".join(f", {number} {WORDS[status]}" for status, number in kinds.items())
    )


def table(report: ScriptReport) -> Iterator[str]:
    """Yields a line for each name and finding, and below one that needs it what to do about it."""
    lines = [
        (name.name, name.lines, "NOT PROVIDED" if name.fault else "provided", name.fault)
        for name in report.names
    ]
    lines += [(each.row.name, each.lines, each.row.status, each.row.advice) for each in report.findings]
    width = max(len(name) for name, *_ in lines)
    for name, numbers, status, remark in lines:
        where = ", ".join(map(str, numbers))
        yield f"  {name:{width}}  {status:12}  {'lines' if numbers[1:] else 'line'} {where}"
        if remark:
            yield f"    {remark}"


def count(number: int, noun: str) -> str:
    """Writes a number of things.

    >>> count(1, "name"), count(0, "name")
    ('1 name', '0 names')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---- One file ----


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

    @property
    def missing(self) -> tuple[UsedName, ...]:
        return tuple(name for name in self.names if name.fault)

    @property
    def broken(self) -> tuple[OldLines, ...]:
        return tuple(finding for finding in self.findings if finding.row.status == BREAKS)


def check_file(path: Path, modules: Modules | None = None) -> ScriptReport:
    """Reads a script, or one of its modules; raises AmpValueError if Python could not read it either."""
    if path.suffix == ".ipynb":  # which is an expression of Python's as well
        raise AmpValueError(f"'{path}' is a notebook: expected a Python script, so export it as one")
    modules = modules or Modules(path)
    try:
        uses, findings = read(path.read_bytes(), str(path), functools.partial(modules.names, path))
    except OSError as error:
        raise AmpValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"'{path}', line {line}" if line else f"'{path}'"
        raise AmpValueError(f"{place}: {getattr(error, 'msg', error)}; {expected_of(error)}") from None
    lines: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for use in uses:
        judged = judge(use) if is_of(use.name, ROOTS) else None
        if judged is not None:
            lines[judged].append(use.line)
    names = [UsedName(name, tuple(dict.fromkeys(at)), fault) for (name, fault), at in lines.items()]
    if modules.reads_rank:  # so that it needs no option
        findings = tuple(finding for finding in findings if finding.row is not rows.RANK)
    return ScriptReport(path, tuple(sorted(names, key=lambda name: name.name)), findings)


def expected_of(error: SyntaxError | ValueError) -> str:
    """Says what to do about a file that is not in the language of this Python."""
    message, line = str(getattr(error, "msg", error)), getattr(error, "text", None) or ""
    if isinstance(error, TabError):
        return "no Python 3 takes tabs and spaces mixed like this: expand the tabs in your editor"
    if any(word in message for word in PYTHON_2) or LINE_OF_PYTHON_2.search(line):
        return "this is Python 2: convert it by 2to3, which Python 3.12 still has"
    version = ".".join(map(str, sys.version_info[:2]))
    return f"expected a script that Python {version} can parse: mend the line, or leave the file out"


def judge(use: Use) -> tuple[str, str | None] | None:
    """Returns the name that a use is of, and why it is not provided, if so; None if nobody can say."""
    known, value, rest = look_up(use.name)
    if not rest:
        return known, None
    fault = explain(use.name)
    if fault is None and use.sure:
        close = difflib.get_close_matches(rest[0], dir(value), 1)
        fault = f"{known} has no {rest[0]!r}" + "".join(f"; close: {each}" for each in close)
    return (use.name, fault) if fault else None


def look_up(name: str) -> tuple[str, object, tuple[str, ...]]:
    """Looks a name of apex up: returns the part that is there, what it stands for, and what is left."""
    first, *rest = name.split(".")
    if first == "apex":
        return walk(first, ampatch.apex, tuple(rest))
    if first in EXTENSIONS:
        return walk(first, importlib.import_module(own_name(first)), tuple(rest))
    return first, None, (first,)


def walk(known: str, value: object, rest: tuple[str, ...]) -> tuple[str, object, tuple[str, ...]]:
    """Does the same from a known part on; only modules and our classes are looked into."""
    is_class = isinstance(value, type) and value.__module__.startswith(OURS)
    if not rest or rest[0].startswith("__") or not (is_class or isinstance(value, ModuleType)):
        return known, value, ()
    # `apex.amp._amp_state` is an object, and in `from apex.amp._amp_state import ...` a module.
    ways = [walk(f"{known}.{rest[0]}", each, rest[1:]) for each in step(value, rest[0])]
    return min(ways, key=lambda way: (len(way[2]), -len(way[0])), default=(known, value, rest))


def step(value: object, name: str) -> Iterator[object]:
    """Yields what an attribute stands for, and a submodule of that name."""
    if value is ampatch.apex:
        if name in PARTS:
            yield importlib.import_module(own_name(f"apex.{name}"))
        return
    if name in vars(value) or (isinstance(value, type) and hasattr(value, name)):
        yield getattr(value, name)
    if hasattr(value, "__path__"):
        whole = own_name(f"{apex_name(value.__name__)}.{name}")
        if importlib.util.find_spec(whole) is not None:
            yield importlib.import_module(whole)


# ---- The files of a script ----


class Modules:
    """The modules beside a script: which of them it imports, and what these bring of other packages."""

    def __init__(self, path: Path) -> None:
        """Takes a script, or a folder: its scripts, but for what is hidden, are then the files."""
        self._is_folder = path.is_dir()
        self._script = path / "__main__.py" if self._is_folder else path
        self._folders = own_roots(self._script)
        self._roots = LEGACY - (own_names(self._script.parent) - ROOTS)
        self._exported: dict[Path, Mapping[str, str]] = {}
        self.files = [*(visible_files(path) if self._is_folder else self._follow_imports())]

    def _follow_imports(self) -> Iterator[Path]:
        """Yields the script and the files that it imports, and so on, each once; runs nothing."""
        waiting, visited = [self._script], set()
        while waiting:
            path = waiting.pop(0)
            if path.resolve() not in visited:
                visited.add(path.resolve())
                yield path
                waiting += imported_files(path, self._find)

    def names(self, path: Path, tree: ast.Module) -> Names:
        """Returns what names stand for in a file."""
        names = Names(tree, functools.partial(self._bring, path), self._roots)
        names.makes_bytes |= self._makes_bytes
        return names

    def _texts(self) -> Iterator[bytes]:
        for path in self.files:
            with suppress(OSError):  # of which check_file says more
                yield path.read_bytes()

    @functools.cached_property
    def _makes_bytes(self) -> bool:
        return not self._is_folder and any(map(MAKES_BYTES.search, self._texts()))

    @functools.cached_property
    def reads_rank(self) -> bool:
        return any(READS_RANK.search(text.decode("latin-1")) for text in self._texts())

    def _find(self, module: str) -> Iterator[Path]:
        """Yields the files of a module; a script that imports from its folder's name means it.

        It may also be in a folder from there up to the current one, which scripts put on their path.
        """
        here, parents = Path.cwd(), self._script.absolute().parents
        around = [parents[1]] if is_of(module, frozenset({parents[0].name})) else []
        if not is_of(module, LEGACY):
            around += [
                each for each in self._script.parents if here in (each.absolute(), *each.absolute().parents)
            ]
        yield from find_files(module, [*self._folders, *around])

    def _bring(self, path: Path, module: str, level: int) -> Mapping[str, str]:
        if level == 0 and is_of(module, self._roots):
            return {name: f"{module}.{name}" for name in star_names(module)}
        begin = above(path, level)
        files = [*(find_files(module, begin) if begin else self._find(module))]
        return self._export(files[-1]) if files else {}

    def _export(self, path: Path) -> Mapping[str, str]:
        if path not in self._exported:
            self._exported[path] = {}  # for modules that import each other
            with suppress(OSError, SyntaxError, ValueError):
                tree, _ = parse(path.read_bytes(), str(path))
                self._exported[path] = self.names(path, tree).exported()
        return self._exported[path]


def visible_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*.py")):
        if not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file


def star_names(module: str) -> tuple[str, ...]:
    """Returns what `from module import *` brings."""
    _, own, rest = look_up(module)
    is_ours = isinstance(own, ModuleType) and not rest
    return tuple(name for name, _ in public_names(own.__name__)) if is_ours else ()


def own_roots(script: Path) -> list[Path]:
    """Returns the folders that a script's own modules are in: its own, and that of the package around it."""
    top = script.parent
    while (top / "__init__.py").exists() and top != top.parent:
        top = top.parent
    return list(dict.fromkeys([script.parent, top]))


def own_names(folder: Path) -> set[str]:
    """Returns the names of the packages and modules in a script's folder, which come before all others."""
    modules = {path.stem for path in folder.glob("*.py")}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")}


def above(path: Path, level: int) -> Sequence[Path]:
    """Returns the folder where a relative import of so many dots begins, none for another."""
    whole = path if level <= len(path.parents) else path.absolute()
    return whole.parents[level - 1 : level] if level else ()


def imported_files(path: Path, find: Callable[[str], Iterable[Path]]) -> Iterator[Path]:
    """Yields the files that the imports of a file run, as `find` finds them; apex is none of them."""
    with suppress(OSError, SyntaxError, ValueError):  # of which check_file says more
        tree, _ = parse(path.read_bytes(), str(path))
        for node in ast.walk(tree):
            begin = above(path, getattr(node, "level", 0))
            match node:
                case ast.Import(aliases):
                    names = [alias.name for alias in aliases]
                case ast.ImportFrom(module, aliases):
                    names = [f"{module or ''}.{alias.name}".strip(".") for alias in aliases]
                case ast.Call(function, [ast.Constant(str(name)), *_]):
                    names = [name] if ast.unparse(function).endswith("import_module") else []
                case _:
                    continue
            for name in names:
                if begin:
                    yield from find_files(name, begin)
                elif not is_of(name, ROOTS):
                    yield from find(name)


def find_files(module: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yields the files that Python would run for a module, where the first of these folders has it."""
    first, _, rest = module.partition(".")
    for folder in folders:
        package, file = folder / first / "__init__.py", folder / f"{first}.py"
        if package.is_file():
            yield package
        elif file.is_file():
            yield file
            return
        elif not (folder / first).is_dir():
            continue
        if rest:
            yield from find_files(rest, [folder / first])
        return
