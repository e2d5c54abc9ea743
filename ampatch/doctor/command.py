"""`ampatch doctor`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ampatch import OPT_LEVELS, AmpError, AmpValueError
from ampatch.apex.run_command import DEVICE_HELP, LEGACY_HELP
from ampatch.apex.script import find_script
from ampatch.doctor.page.outputs import add_outputs, validate_outputs, write_outputs
from ampatch.doctor.words import describe

SUMMARY = "run a script whose training breaks, and say which line broke it, why, and what to do"
USAGE = """ampatch doctor [OPTIONS] SCRIPT [-- ARGS...]
       ampatch doctor [OPTIONS] -m MODULE [-- ARGS...]
       ampatch doctor --open FILE"""
EPILOG = """The script runs two or three times: watched, traced where it broke, and in float32; then once
for each piece of advice that is tried, up to four. Everything after -- goes to it. Exit status: 0
nothing was found (silent faults do not count), 1 something was, 2 bad input, 3 something broke and
could not be traced, 130 after Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch doctor` accepts; the arguments of the script follow after `--`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that trains")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    parser.add_argument("--opt-level", metavar="L", help="the level that initialize is made to use")
    parser.add_argument("--device", choices=["cpu"], help=DEVICE_HELP)
    parser.add_argument("--legacy", action="store_true", help=LEGACY_HELP)
    proposal = (
        "find the fewest modules that must stay float32; runs the script once for each, twice from two on"
    )
    trying = "do not run the script again to try the advice"
    parser.add_argument("--no-tries", action="store_true", help=trying)
    parser.add_argument("--propose", action="store_true", help=proposal)
    opening = "say what a post-mortem holds, the file that training leaves when it breaks; runs nothing"
    parser.add_argument("--open", metavar="FILE", type=Path, help=opening)
    add_outputs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examines a script and says what was found; returns the exit status."""
    if arguments.open is not None:
        return open_post_mortem(arguments.open)
    # What traces is imported when it is asked for, not by each `ampatch run`.
    from ampatch.doctor.campaign import Campaign
    from ampatch.doctor.runs import Run

    script = find_script(arguments)
    if arguments.opt_level not in (None, *OPT_LEVELS):
        raise AmpValueError(f"--opt-level {arguments.opt_level!r}: expected one of {', '.join(OPT_LEVELS)}")
    script.validate()
    validate_outputs(arguments)
    given = {"level": arguments.opt_level, "device": script.device, "legacy": script.legacy}
    run = Run(script.name, script.arguments, script.is_module, **given)
    report = Campaign(run, tries=not arguments.no_tries, every=arguments.every).report(
        arguments.propose, arguments.against
    )
    print("\n".join(describe(report)), file=sys.stdout)
    try:
        write_outputs(report, arguments, script.name)
    except OSError as error:  # as of a full disk
        raise AmpError(f"the report was not written: {error}") from error
    return 1 if report.findings else 3 if report.untraced else 0


def open_post_mortem(path: Path) -> int:
    """Says what a file holds that training left; returns the exit status."""
    from ampatch.doctor import post_mortem

    found = post_mortem.read(path)
    try:
        lines = list(post_mortem.describe(found))
    except Exception as error:  # of values that are not what training leaves
        raise AmpValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    print("\n".join(lines), file=sys.stdout)
    return 0
