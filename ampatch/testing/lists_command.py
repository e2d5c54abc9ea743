"""`ampatch lists`: prints the cast tables, or what happens to one op."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from ampatch import AmpError, AmpValueError, explain
from ampatch.casts.catalog import SHORT, Catalog
from ampatch.casts.explanation import COLUMNS, Explanation, align
from ampatch.lists import MODULES_ON_CPU
from ampatch.table import Cast, CastTable, Row

SUMMARY = "print the cast tables, or say what happens to one op at each level, and why"
HEADINGS = ("function", "cast", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch lists` accepts."""
    parser.add_argument("op", metavar="OP", nargs="?", help="an op: softmax, F.softmax, Tensor.exp_, @")
    parser.add_argument("--cast", help="only rows of this cast: " + ", ".join(cast.name for cast in Cast))
    parser.add_argument("--target", metavar="PLACE", help="only rows of this place: torch.Tensor, F, fft")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for; returns 0."""
    if arguments.op is None:
        show_tables(select(arguments.cast, arguments.target), arguments.json)
    elif arguments.cast or arguments.target:
        raise AmpError("--cast and --target select rows of the tables: leave them out beside OP")
    else:
        show_op(explain(arguments.op), arguments.json)
    sys.stdout.flush()  # a reader that is gone is noticed here, where we can say so
    return 0


def select(cast: str | None, target: str | None) -> tuple[CastTable, ...]:
    """The tables, narrowed to a cast and a place; raises AmpValueError for what there is not."""
    said = [replace(row, reason=f"in a half model on a CPU: {row.reason}") for row in MODULES_ON_CPU.rows]
    tables = merge((*Catalog().tables, CastTable(MODULES_ON_CPU.target, tuple(said))))
    if cast is not None and cast.upper() not in Cast.__members__:
        raise AmpValueError(f"unknown cast {cast!r}: expected one of {', '.join(Cast.__members__)}")
    if target is not None:
        known = dict.fromkeys(table.target for table in tables)
        place = SHORT.get(target, target)
        if place not in known:
            raise AmpValueError(f"no table of {target!r}: expected one of {', '.join(known)}")
        tables = tuple(table for table in tables if table.target == place)
    if cast is not None:
        wanted = Cast[cast.upper()]
        tables = tuple(
            CastTable(table.target, tuple(row for row in table.rows if row.cast is wanted))
            for table in tables
        )
    return tuple(table for table in tables if table.rows)


def merge(tables: Sequence[CastTable]) -> tuple[CastTable, ...]:
    """One table for each place."""
    places = dict.fromkeys(table.target for table in tables)
    return tuple(
        CastTable(place, tuple(row for table in tables if table.target == place for row in table.rows))
        for place in places
    )


def show_tables(tables: Sequence[CastTable], as_json: bool) -> None:
    """Prints tables, a heading for each place."""
    if as_json:
        rows = [
            {"target": table.target, **asdict(row), "cast": row.cast.name}
            for table in tables
            for row in table.rows
        ]
        print(json.dumps(rows, indent=2))
    elif is_rich():
        print_rich([(table.target, HEADINGS, cells(table)) for table in tables])
    else:
        for table in tables:
            print(table.target)
            print("\n".join(f"  {line}" for line in align(cells(table))), end="\n\n")


def cells(table: CastTable) -> list[tuple[str, ...]]:
    """Writes the rows of a table."""
    return [(row.name, row.cast.name, row.reason + versions(row)) for row in table.rows]


def versions(row: Row) -> str:
    """Says in which torch versions a row holds, if not in all.

    >>> versions(Row("mm", Cast.LOWER, "a product", since="2.13"))
    ' (since torch 2.13)'
    """
    words = ("since", row.since), ("until", row.until)
    return "".join(f" ({word} torch {version})" for word, version in words if version)


def show_op(explanation: Explanation, as_json: bool) -> None:
    """Prints what happens to an op."""
    if as_json:
        said = [
            {
                "name": name.path,
                "cast": name.cast and name.cast.name,
                "reason": name.reason,
                "levels": [asdict(effect) for effect in name.effects()],
            }
            for name in explanation.names
        ]
        print(json.dumps({"op": explanation.op, "names": said}, indent=2))
    elif is_rich():
        for names in explanation.groups():
            reasons = [(name.path, name.reason) for name in names]
            effects = [effect.cells() for effect in names[0].effects()]
            print_rich([(names[0].heading(), ("name", "why"), reasons), ("", COLUMNS, effects)])
    else:
        print(explanation)


def is_rich() -> bool:
    """Whether to draw: on a terminal, and with rich, which is an extra."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_rich(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]) -> None:
    """Draws (title, headings, rows) on the terminal, whose width they keep."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, headings, rows in tables:
        table = Table(title=Text(title), box=SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
        for heading in headings:
            table.add_column(heading, style="bold" if heading == headings[0] else None)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
