"""`ampatch doctor`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ampatch import OPT_LEVELS, AmpError, AmpValueError
from ampatch.apex.run_command import DEVICE_HELP, LEGACY_HELP, UNSAFE_HELP
from ampatch.apex.script import find_script
from ampatch.doctor.words import describe

SUMMARY = "run a script whose training breaks, and say which line broke it, why, and what to do"
USAGE = """ampatch doctor [OPTIONS] SCRIPT [-- ARGS...]
       ampatch doctor [OPTIONS] -m MODULE [-- ARGS...]
       ampatch doctor --open FILE"""
EPILOG = """The script runs three or four times: watched, traced where it broke, and in float32; then once
for each piece of advice that is tried, up to four. Everything after -- is passed to the script. Exit status:
0 nothing was found, 1 something was found (a silent fault counts only if its fix was tried and helps, or if
the script learns less than in float32), 2 bad input, 3 something broke and could not be traced, or the
script raised an error in float32 as well, 130 after Ctrl-C."""


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
    trying = "do not run the script again to try the advice"
    parser.add_argument("--no-tries", action="store_true", help=trying)
    opening = "explain a post-mortem, the file that training writes when it breaks; runs nothing"
    parser.add_argument("--open", metavar="FILE", type=Path, help=opening)
    parser.add_argument("--json", metavar="OUT", help="write the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examines a script and says what was found; returns the exit status."""
    if arguments.open is not None:
        return open_post_mortem(arguments.open)
    # What traces is imported when it is asked for, not by each `ampatch run`.
    from ampatch.doctor.campaign import SECONDS, Campaign
    from ampatch.doctor.run import ScriptRun

    script, out = find_script(arguments), arguments.json
    if arguments.opt_level not in (None, *OPT_LEVELS):
        raise AmpValueError(f"--opt-level {arguments.opt_level!r}: expected one of {', '.join(OPT_LEVELS)}")
    script.validate()
    if out is not None and not os.path.isdir(os.path.dirname(os.path.abspath(out))):
        raise AmpValueError(f"--json {out!r}: expected a file in a folder that exists")
    options = {"device": script.device, "legacy": script.legacy, "unsafe_load": script.unsafe_load}
    run = ScriptRun(script.name, script.arguments, script.is_module, level=arguments.opt_level, **options)
    if (arguments.seconds or 0) < 0:
        raise AmpValueError(f"--seconds {arguments.seconds:g}: expected a number of seconds, or 0")
    seconds = SECONDS if arguments.seconds is None else arguments.seconds
    tries = not arguments.no_tries
    campaign = Campaign(run, tries=tries, tell=show_progress, seconds=seconds or None)
    report = campaign.report()
    show_progress("")
    print("\n".join(describe(report)), file=sys.stdout)
    try:
        if out is not None:
            Path(out).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # as of a full disk
        raise AmpError(f"the report was not written: {error}") from error
    is_found = any(finding.is_harmful for finding in (*report.findings, *report.silent))
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

    contents = post_mortem.read(path)
    try:
        lines = list(post_mortem.describe(contents))
    except Exception as error:  # of values that are not what training leaves
        raise AmpValueError(
            f"{path} is damaged: {type(error).__name__}: {post_mortem.readable(error)}"
        ) from None
    print("\n".join(lines), file=sys.stdout)
    return 0
