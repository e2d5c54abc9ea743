"""`ampatch lists`: prints the cast tables, or what happens to one op."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace

from ampatch import AmpError, AmpValueError, explain
from ampatch.casts.catalog import COLUMNS, SHORT, Explanation, align
from ampatch.lists import MODULES_ON_CPU, TABLES
from ampatch.table import Cast, CastTable, Row

SUMMARY = "print the cast tables, or show what happens to one op at each level, and why"
HEADINGS = ("function", "cast", "reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch lists` accepts."""
    parser.add_argument("op", metavar="OP", nargs="?", help="an op: softmax, F.softmax, Tensor.exp_, @")
    parser.add_argument("--cast", help="only rows with this cast: " + ", ".join(cast.name for cast in Cast))
    parser.add_argument("--target", metavar="PLACE", help="only rows of one namespace: torch.Tensor, F, fft")
    parser.add_argument("--json", action="store_true", help="write JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for; returns 0."""
    if arguments.op is None:
        show_tables(select(arguments.cast, arguments.target), arguments.json)
    elif arguments.cast or arguments.target:
        raise AmpError("--cast and --target select rows of the tables: leave them out with OP")
    else:
        show_op(explain(arguments.op), arguments.json)
    sys.stdout.flush()  # a reader that is gone is noticed here, where we can say so
    return 0


def select(cast: str | None, target: str | None) -> dict[str, list[Row]]:
    """The rows of each place, narrowed to a cast and a place; raises AmpValueError for unknown ones."""
    if cast is not None and cast.upper() not in Cast.__members__:
        raise AmpValueError(f"unknown cast {cast!r}: expected one of {', '.join(Cast.__members__)}")
    on_cpu = [replace(row, reason=f"in a half model on a CPU: {row.reason}") for row in MODULES_ON_CPU.rows]
    places: dict[str, list[Row]] = {}
    for table in (*TABLES, CastTable(MODULES_ON_CPU.target, tuple(on_cpu))):
        places.setdefault(table.target, []).extend(table.rows)
    if target is not None:
        place = SHORT.get(target, target)
        if place not in places:
            raise AmpValueError(f"no table of {target!r}: expected one of {', '.join(places)}")
        places = {place: places[place]}
    kinds = Cast if cast is None else (Cast[cast.upper()],)
    selected = {place: [row for row in rows if row.cast in kinds] for place, rows in places.items()}
    return {place: rows for place, rows in selected.items() if rows}


def show_tables(tables: Mapping[str, Sequence[Row]], as_json: bool) -> None:
    if as_json:
        entries = [
            {"target": place, **asdict(row), "cast": row.cast.name}
            for place, rows in tables.items()
            for row in rows
        ]
        print(json.dumps(entries, indent=2))
    elif is_rich():
        print_rich([(place, HEADINGS, cells(rows)) for place, rows in tables.items()])
    else:
        for place, rows in tables.items():
            print(place)
            print("\n".join(f"  {line}" for line in align(cells(rows))), end="\n\n")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(row.name, row.cast.name, row.reason + versions(row)) for row in rows]


def versions(row: Row) -> str:
    """Says in which torch versions a row holds, if not in all.

    >>> versions(Row("mm", Cast.LOWER, "a product", since="2.13"))
    ' (since torch 2.13)'
    """
    words = ("since", row.since), ("until", row.until)
    return "".join(f" ({word} torch {version})" for word, version in words if version)


def show_op(explanation: Explanation, as_json: bool) -> None:
    if as_json:
        entries = [
            {
                "name": name.path,
                "cast": name.cast and name.cast.name,
                "reason": name.reason,
                "levels": [asdict(effect) for effect in name.effects()],
            }
            for name in explanation.names
        ]
        print(json.dumps({"op": explanation.op, "names": entries}, indent=2))
    elif is_rich():
        for names in explanation.groups():
            reasons = [(name.path, name.reason) for name in names]
            effects = list(map(astuple, names[0].effects()))
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
