"""`ampatch check`: lists the names of apex that scripts use, what of it breaks, and what to do."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampatch import AmpError, AmpValueError
from ampatch.apex.drop_in.real import is_real_installed
from ampatch.apex.legacy.old import BREAKS, MAY_BREAK, NEEDS_CUDA, WARNS

if TYPE_CHECKING:
    from ampatch.apex.checking.check import ScriptReport
    from ampatch.apex.checking.imports import Modules

SUMMARY = "list what a script uses of apex, what in it breaks today or needs CUDA, and what to do about it"
# Of how many in all.
WORDS = {BREAKS: "broken today", MAY_BREAK: "perhaps", WARNS: "with a warning", NEEDS_CUDA: "for CUDA"}


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
    from ampatch.apex.checking.check import check_file

    files: dict[Path, tuple[Path, Modules]] = {}
    for path in arguments.paths:
        for file, modules in find_files(Path(path)):
            files.setdefault(file.resolve(), (file, modules))
    asked_for = {Path(path).resolve() for path in arguments.paths}
    read: list[tuple[Modules, ScriptReport]] = []
    faults, notes = [], []
    for place, (file, modules) in files.items():
        try:
            read.append((modules, check_file(file, modules)))
        except AmpError as error:  # of a file that is imported: it may be for another Python
            (faults if asked_for & {place, *place.parents} else notes).append(error)
    ranked = {modules for modules, report in read if report.reads_rank}
    reports = [report.without_rank() if modules in ranked else report for modules, report in read]
    show(reports)
    for skipped in notes:
        print(f"not checked: {skipped}")
    if is_real_installed():
        print("apex is installed: what it still has can be used as well, whatever the list above says")
    sys.stdout.flush()
    if faults:
        more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        raise AmpValueError(f"{faults[0]}{more}")
    return int(any(report.missing or report.broken for report in reports))


def find_files(path: Path) -> Iterator[tuple[Path, Modules]]:
    """Yields the files of a script, or of a folder, and what they import; what is hidden is left out."""
    from ampatch.apex.checking.check import star_names
    from ampatch.apex.checking.imports import Modules

    if not path.exists():
        raise AmpValueError(f"'{path}' does not exist: expected a Python script or a folder")
    if not path.is_dir():
        modules = Modules(path, star_names)
        yield from ((file, modules) for file in modules.follow())
        return
    modules = Modules(path / "__main__.py", star_names)
    for file in sorted(path.rglob("*.py")):
        if not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file, modules


def show(reports: Sequence[ScriptReport]) -> None:
    """Prints the names of each script, and how many there are in all."""
    for report in reports:
        if report.names or report.findings:
            print(report.path, *table(report), sep="\n")
    missing = {name.name for report in reports for name in report.missing}
    names = {name.name for report in reports for name in report.names}
    print(
        f"{count(len(reports), 'script')}, {count(len(names), 'name')} of apex, {len(missing)} not provided"
        + "".join(f", {number} {WORDS[status]}" for status, number in count_findings(reports))
    )


def count_findings(reports: Sequence[ScriptReport]) -> Iterator[tuple[str, int]]:
    """Yields how many findings there are of each kind, for kinds that there are."""
    kinds = [finding.row.status for report in reports for finding in report.findings]
    yield from Counter(kinds).items()


def table(report: ScriptReport) -> Iterator[str]:
    """Yields a line for each name and finding, and below one that needs it what to do about it."""
    rows = [
        (name.name, name.lines, "NOT PROVIDED" if name.fault else "provided", name.fault)
        for name in report.names
    ]
    rows += [(it.row.name, it.lines, it.row.status, it.row.advice) for it in report.findings]
    width = max(len(name) for name, *_ in rows)
    for name, lines, status, remark in rows:
        where = ", ".join(map(str, lines))
        yield f"  {name:{width}}  {status:12}  {'lines' if lines[1:] else 'line'} {where}"
        if remark:
            yield f"    {remark}"


def count(number: int, noun: str) -> str:
    """Writes a number of things.

    >>> count(1, "name"), count(0, "name")
    ('1 name', '0 names')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
