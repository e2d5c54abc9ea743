"""What `ampatch doctor` writes: its report as JSON, a page, a table, and scalars for TensorBoard."""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ampatch import OPT_LEVELS, AmpValueError
from ampatch.doctor.growth.curves import QUANTITIES
from ampatch.tools.packages import require

if TYPE_CHECKING:
    from ampatch.doctor.finding import Report

NUMBERS = (*QUANTITIES, "headroom")
COLUMNS = ("attempt", "step", "model", "module", "dtype", *NUMBERS)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--json", metavar="OUT", help="write the report to this file")
    levels = "compare with a level: which module departs first, on the same batches; two more runs"
    parser.add_argument("--against", metavar="LEVEL", help=levels)
    every = "note the layers at each Nth step (default: enough for curves of 200 to 400 points)"
    parser.add_argument("--every", metavar="N", type=int, default=0, help=every)
    parser.add_argument("--html", metavar="OUT", help="write the report as a page that opens anywhere")
    parser.add_argument("--csv", metavar="OUT", help="write the curves of layers as a table")
    parser.add_argument("--tensorboard", metavar="DIR", help="write the curves of layers as scalars")


def validate_outputs(arguments: argparse.Namespace) -> None:
    """Raises what is wrong with the options, before the script runs."""
    if arguments.against not in (None, *OPT_LEVELS):
        raise AmpValueError(f"--against {arguments.against!r}: expected one of {', '.join(OPT_LEVELS)}")
    if arguments.every < 0:
        raise AmpValueError(f"--every {arguments.every}: expected a number of steps, or 0")
    for option in ("json", "html", "csv"):
        path = getattr(arguments, option)
        if path is not None and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise AmpValueError(f"--{option} {path!r}: expected a file in a folder that exists")
    needed = {"jinja2": arguments.html, "tensorboard": arguments.tensorboard}
    require(*(package for package, option in needed.items() if option))


def write_outputs(report: Report, arguments: argparse.Namespace, script: str) -> None:
    """Writes what was asked for."""
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if arguments.html is not None:
        from ampatch.doctor.page.page import write_page

        Path(arguments.html).write_text(write_page(report, script), encoding="utf-8")
    if report.growth is not None and arguments.csv:
        write_csv(report.growth, arguments.csv)
    if report.growth is not None and arguments.tensorboard:
        write_scalars(report.growth, arguments.tensorboard)


def rows_of(growth: dict) -> Iterator[tuple[object, ...]]:
    """Yields a row of `COLUMNS` for each attempt and layer; None for what did not run or is not finite."""
    for index, (attempt, step) in enumerate(zip(growth["attempts"], growth["steps"], strict=True)):
        for layer in growth["layers"]:
            numbers = [layer[name][index] for name in NUMBERS]
            if any(it is not None for it in numbers):
                yield (attempt, step, layer["model"], layer["module"], layer["dtype"], *numbers)


def write_csv(growth: dict, path: str) -> None:
    """Writes a table with a line of headings."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows_of(growth))


def write_scalars(growth: dict, folder: str) -> None:
    """Writes a scalar for each quantity, layer and attempt, tagged `quantity/model.module`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for attempt, _, model, module, _, *numbers in rows_of(growth):
            for name, number in zip(NUMBERS, numbers, strict=True):
                if number is not None:
                    writer.add_scalar(
                        f"{name}/{model}.{module}" if module else f"{name}/{model}", number, attempt
                    )
