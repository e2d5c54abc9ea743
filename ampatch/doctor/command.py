"""`ampatch doctor`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ampatch import OPT_LEVELS, AmpError, AmpValueError
from ampatch.apex.run_command import DEVICE_HELP, LEGACY_HELP, UNSAFE_HELP
from ampatch.apex.script import find_script
from ampatch.doctor.finding import Report
from ampatch.doctor.growth.curves import QUANTITIES
from ampatch.doctor.words import describe
from ampatch.tools.packages import require

SUMMARY = "run a script whose training breaks, and say which line broke it, why, and what to do"
USAGE = """ampatch doctor [OPTIONS] SCRIPT [-- ARGS...]
       ampatch doctor [OPTIONS] -m MODULE [-- ARGS...]
       ampatch doctor --open FILE"""
EPILOG = """The script runs two or three times: watched, traced where it broke, and in float32; then once
for each piece of advice that is tried, up to four. Everything after -- goes to the script. Exit status:
0 nothing was found, 1 something was found (a silent fault counts only if its fix was tried and helps),
2 bad input, 3 something broke and could not be traced, or the script raised an error, 130 after Ctrl-C."""
NUMBERS = (*QUANTITIES, "headroom")
COLUMNS = ("attempt", "step", "model", "module", "dtype", *NUMBERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch doctor` accepts; the arguments of the script follow after `--`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that trains")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    parser.add_argument("--opt-level", metavar="L", help="use this level instead of the script's")
    parser.add_argument("--device", choices=["cpu"], help=DEVICE_HELP)
    parser.add_argument("--legacy", action="store_true", help=LEGACY_HELP)
    parser.add_argument("--unsafe-load", action="store_true", help=UNSAFE_HELP)
    late = "end the watched run after N seconds (default: 600), and each other after twice as many; 0: never"
    parser.add_argument("--seconds", metavar="N", type=float, help=late)
    proposal = (
        "find the fewest modules that must stay float32; runs the script once more for each of them, and "
        "once again without each if there are several"
    )
    trying = "do not run the script again to try the advice"
    parser.add_argument("--no-tries", action="store_true", help=trying)
    parser.add_argument("--propose", action="store_true", help=proposal)
    opening = "explain a post-mortem, the file that training writes when it breaks; runs nothing"
    parser.add_argument("--open", metavar="FILE", type=Path, help=opening)
    parser.add_argument("--json", metavar="OUT", help="write the report as JSON")
    levels = "name the first module that departs from another level on the same batches; two more runs"
    parser.add_argument("--against", metavar="LEVEL", help=levels)
    every = "record the layers at every Nth step (default: enough for curves of 200 to 400 points)"
    parser.add_argument("--every", metavar="N", type=int, default=0, help=every)
    parser.add_argument("--html", metavar="OUT", help="write the report as one page that needs no network")
    parser.add_argument("--csv", metavar="OUT", help="write the curves of the layers as a table")
    scalars = "write the curves of the layers for TensorBoard"
    parser.add_argument("--tensorboard", metavar="DIR", help=scalars)


def run(arguments: argparse.Namespace) -> int:
    """Examines a script and says what was found; returns the exit status."""
    if arguments.open is not None:
        return open_post_mortem(arguments.open)
    # What traces is imported when it is asked for, not by each `ampatch run`.
    from ampatch.doctor.campaign import SECONDS, Campaign
    from ampatch.doctor.run import Run

    script = find_script(arguments)
    if arguments.opt_level not in (None, *OPT_LEVELS):
        raise AmpValueError(f"--opt-level {arguments.opt_level!r}: expected one of {', '.join(OPT_LEVELS)}")
    script.validate()
    validate_outputs(arguments)
    given = {"device": script.device, "legacy": script.legacy, "unsafe_load": script.unsafe_load}
    run = Run(script.name, script.arguments, script.is_module, level=arguments.opt_level, **given)
    options = {"tries": not arguments.no_tries, "every": arguments.every}
    seconds = SECONDS if arguments.seconds is None else arguments.seconds
    campaign = Campaign(run, tell=show_progress, seconds=seconds or None, **options)
    report = campaign.report(arguments.propose, arguments.against)
    show_progress("")
    print("\n".join(describe(report)), file=sys.stdout)
    try:
        write_outputs(report, arguments, script.name)
    except OSError as error:  # as of a full disk
        raise AmpError(f"the report was not written: {error}") from error
    is_found = any(it.is_harmful for it in (*report.findings, *report.silent))
    return 1 if is_found else 3 if report.untraced else 0


def show_progress(text: str) -> None:
    """Writes a line, which the next one takes the place of on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def open_post_mortem(path: Path) -> int:
    """Says what a file holds that training left; returns the exit status."""
    from ampatch.doctor import post_mortem

    found = post_mortem.read(path)
    try:
        lines = list(post_mortem.describe(found))
    except Exception as error:  # of values that are not what training leaves
        raise AmpValueError(
            f"{path} is damaged: {type(error).__name__}: {post_mortem.readable(error)}"
        ) from None
    print("\n".join(lines), file=sys.stdout)
    return 0


# ---- What it writes ----


def validate_outputs(arguments: argparse.Namespace) -> None:
    """Raises what is wrong with the options, before the script runs."""
    if arguments.against not in (None, *OPT_LEVELS):
        raise AmpValueError(f"--against {arguments.against!r}: expected one of {', '.join(OPT_LEVELS)}")
    if (arguments.seconds or 0) < 0:
        raise AmpValueError(f"--seconds {arguments.seconds:g}: expected a number of seconds, or 0")
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
            layer = f"{model}.{module}" if module else model
            for name, number in zip(NUMBERS, numbers, strict=True):
                if number is not None:
                    writer.add_scalar(f"{name}/{layer}", number, attempt)
