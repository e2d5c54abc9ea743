"""`ampatch check`: lists the names of apex that scripts use, and which of them are provided."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampatch import AmpError, AmpValueError
from ampatch.apex.drop_in.real import is_real_installed

if TYPE_CHECKING:
    from ampatch.apex.check import Report

SUMMARY = "list the names of apex that a script uses, and which of them ampatch provides"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch check` accepts."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a script, or a folder of them")
    parser.epilog = "Nothing is run. The exit status is 1 if a name is not provided."


def run(arguments: argparse.Namespace) -> int:
    """Prints a report for each script; returns 1 if one of them uses a name that is not provided."""
    from ampatch.apex.check import check_file

    scripts = [script for path in arguments.paths for script in find_scripts(Path(path))]
    reports, faults = [], []
    for script in scripts:
        try:
            reports.append(check_file(script))
        except AmpError as error:
            faults.append(error)
    show(reports)
    if is_real_installed():
        print("apex is installed: what it still has can be used as well, whatever the list above says")
    sys.stdout.flush()
    if faults:
        more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        raise AmpValueError(f"{faults[0]}{more}")
    return int(any(report.missing for report in reports))


def find_scripts(path: Path) -> Iterator[Path]:
    """Yields a file, or the Python files of a folder; what is hidden is left out."""
    if not path.exists():
        raise AmpValueError(f"'{path}' does not exist: expected a Python script or a folder")
    if not path.is_dir():
        yield path
        return
    for script in sorted(path.rglob("*.py")):
        if not any(part.startswith(".") for part in script.relative_to(path).parts):
            yield script


def show(reports: Sequence[Report]) -> None:
    """Prints the names of each script, and how many there are in all."""
    for report in reports:
        if report.names:
            print(report.path, *table(report), sep="\n")
    missing = {name.name for report in reports for name in report.missing}
    names = {name.name for report in reports for name in report.names}
    print(
        f"{count(len(reports), 'script')}, {count(len(names), 'name')} of apex, {len(missing)} not provided"
    )


def table(report: Report) -> Iterator[str]:
    """Yields a line for each name, and below one that is not provided what to do about it."""
    width = max(len(name.name) for name in report.names)
    for name in report.names:
        status = "NOT PROVIDED" if name.fault else "provided"
        where = ", ".join(map(str, name.lines))
        yield f"  {name.name:{width}}  {status:12}  {'lines' if name.lines[1:] else 'line'} {where}"
        if name.fault:
            yield f"    {name.fault}"


def count(number: int, noun: str) -> str:
    """Writes a number of things.

    >>> count(1, "name"), count(0, "name")
    ('1 name', '0 names')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
