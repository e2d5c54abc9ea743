"""`ampatch sweep`: its arguments, and what it does with them."""

import argparse
import importlib.util
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampatch import AmpError
from ampatch.sweep.plan import LEVELS, Plan
from ampatch.sweep.record import Record

SUMMARY = "train a script at several opt levels and compare speed, memory and accuracy"
HINT = "; the script's own go after --"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch sweep` accepts; the arguments of the script follow after `--`."""
    parser.usage = "ampatch sweep SCRIPT [--levels O0,O1,...] [--timeout S] [-- ARGS...]"
    parser.epilog = "Everything after -- goes to the script."
    parser.add_argument("script", metavar="SCRIPT", help="a script that calls initialize")
    parser.add_argument("--levels", default=",".join(LEVELS), help="default: %(default)s")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds a level; default: none")


def run(arguments: argparse.Namespace) -> int:
    """Runs the sweep and shows it; returns 1 if a level failed, 0 otherwise."""
    plan = Plan(
        script=Path(arguments.script),
        script_arguments=arguments.script_arguments,
        levels=tuple(level.strip() for level in arguments.levels.split(",")),
        timeout=arguments.timeout,
    )
    require_rich()
    from ampatch.sweep import view

    records: list[Record] = []
    try:
        with exit_on_sigterm():
            sweep(plan, records)
    finally:
        # Also after Ctrl-C: what is measured is worth showing.
        if records:
            view.show(view.Console(), f"{plan.script.name}, a process a level", records)
    return int(any(record.failed for record in records))


def sweep(plan: Plan, records: list[Record]) -> None:
    """Executes the plan run by run, appends the records, and shows the progress on stderr."""
    from ampatch.sweep import view
    from ampatch.sweep.runner import execute

    console = view.Console(stderr=True)
    directory = tempfile.mkdtemp(prefix="ampatch-sweep-")
    with view.progress_bar(console, plan.levels) as bar:
        for run in plan.runs(directory):
            bar.start(run.name)
            records.append(execute(run, plan.timeout, bar.show_steps))
            bar.finish()
    console.print(f"logs: {directory}", soft_wrap=True, markup=False, highlight=False)


def require_rich() -> None:
    """Raises if rich, which is an extra, is missing."""
    if importlib.util.find_spec("rich") is None:
        raise AmpError("rich is not installed: pip install 'ampatch[tools]'")


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception while the block runs, so that the child is ended with us."""
    try:
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    except ValueError:  # not in the main thread, where Python allows no handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
