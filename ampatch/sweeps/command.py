"""`ampatch sweep`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict

from ampatch import AmpError, AmpValueError
from ampatch.apex.run_command import DEVICE_HELP, LEGACY_HELP, UNSAFE_HELP
from ampatch.apex.script import find_script
from ampatch.sweeps.campaign import SweepCampaign, SweepProgress, describe_machine
from ampatch.sweeps.plan import DEFAULTS, LEAST, Plan, make_plan, parse_rows
from ampatch.sweeps.results import find_folder, find_last, open_results, read_sweep
from ampatch.sweeps.rows import DEFAULT_LEVELS, LEVELS, Ending, Run
from ampatch.sweeps.runner import refuse_ranks
from ampatch.sweeps.show import terminal
from ampatch.tools.process import noting_signals

SUMMARY = "train a script at several opt levels and compare speed, memory and accuracy"
USAGE = """ampatch sweep [OPTIONS] SCRIPT [-- ARGS...]
       ampatch sweep [OPTIONS] -m MODULE [-- ARGS...]"""
EPILOG = """Everything after -- is passed to the script; {seed}, {level}, {row}, {repeat} and {run} in it are
replaced with the values of each run. If you use {seed}, the sweep does not change seeds that the
script sets. Exit status: 0 success, 1 a run failed, 2 bad input, 130 after Ctrl-C."""

# What is run, and what is made of it: options of no value are flags.
OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "levels": (
        {"metavar": "L,..."},
        f"levels, separated by commas: {','.join(LEVELS)}; default: all but O6, cut short if they are slow",
    ),
    "variant": (
        {"metavar": "'L NAME=VALUE...'", "action": "append"},
        "a level with arguments of initialize, such as 'O2 loss_scale=128'; may be repeated",
    ),
    "seeds": (
        {"metavar": "N", "type": int},
        f"train each level with the seeds 0 to N-1; default: {DEFAULTS.seeds}",
    ),
    "repeat": ({"metavar": "N", "type": int}, f"run everything N times; default: {DEFAULTS.repeat}"),
    "steps": (
        {"metavar": "N", "type": int},
        "end a run after N optimizer steps; default: when the script ends",
    ),
    "timeout": ({"metavar": "S", "type": float}, "end a run after S seconds; default: never"),
    "nproc-per-node": (
        {"metavar": "N", "type": int},
        "run the script on N ranks, as `torchrun --standalone --nproc-per-node N` does",
    ),
    "isolate": ({}, "give each run a copy of the working directory, which is deleted afterwards"),
    "resume": ({}, "continue an interrupted sweep of the same script and options"),
    "device": ({"choices": ["cpu"]}, DEVICE_HELP),
    "legacy": ({}, LEGACY_HELP),
    "unsafe-load": ({}, UNSAFE_HELP),
    "out": (
        {"metavar": "DIR"},
        "write sweep.json, sweep.html and logs there; default: the next free ampatch-sweep",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch sweep` accepts; the arguments of the script follow after `--`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that calls initialize")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    for name, (options, meaning) in OPTIONS.items():
        kind = options or {"action": "store_true", "default": None}
        parser.add_argument(f"--{name}", help=meaning, **kind)


def run(arguments: argparse.Namespace) -> int:
    """Runs what was asked for and shows it; returns the exit status."""
    try:
        refuse_ranks()
    except AmpError:
        if os.environ["RANK"] == "0":
            raise
        return 2  # and rank 0 says why
    levels = DEFAULT_LEVELS if arguments.levels is None else arguments.levels.split(",")
    rows = parse_rows([level.strip() for level in levels], arguments.variant or ())
    settings = {
        name: value for name in (*LEAST, "isolate") if (value := getattr(arguments, name)) is not None
    }
    in_full = arguments.levels is not None
    plan = make_plan(find_script(arguments), rows, in_full=in_full, **settings)
    return sweep(plan, arguments.out, resume=bool(arguments.resume))


def sweep(plan: Plan, out: str | None, *, resume: bool = False) -> int:
    """Carries out the plan, writes and shows what came of it; returns the exit status."""
    out = out or (find_last() if resume else find_folder())
    made = runs_to_keep(out, plan) if resume else ()
    failed: OSError | None = None  # a reader that goes away must not end what took hours
    with noting_signals() as stop, open_results(out, keep=resume) as results:
        campaign = SweepCampaign(plan, results, stop, made=made)
        campaign.carry_out(show_progress)
        if campaign.records:
            result = campaign.sweep()
            try:
                results.save(result)
            finally:
                try:
                    terminal.show(sys.stdout, terminal.write(result))
                except OSError as error:
                    failed = error
        for line in results.describe():
            say(line)
        if stop:
            say(f"ampatch sweep: interrupted ({stop.name})")
            if any(not record.failed for record in campaign.records):
                say(f"to go on, add to the command: --resume --out {shlex.quote(str(out))}")
    if failed is not None and not isinstance(failed, BrokenPipeError):
        raise AmpError(f"the table could not be printed: {failed.strerror}")
    if failed is not None:
        raise failed
    return stop.status or int(any(record.failed for record in campaign.records))


def say(text: str) -> None:
    """Prints lines for the user, not for what reads the table."""
    with suppress(OSError):
        terminal.show(sys.stderr, text)


def show_progress(now: SweepProgress) -> None:
    if now.record is not None:
        say(terminal.printable(str(now)))


def runs_to_keep(out: str, plan: Plan) -> tuple[Run, ...]:
    """Returns the runs of an earlier sweep that need not be made again: all that came to an end.

    Raises AmpValueError if it was not the same sweep: of this script, with these settings and versions.
    """
    before = read_sweep(out)
    settings, machine = asdict(before.settings), asdict(before.environment)
    pairs = [(name, settings[name], value) for name, value in asdict(plan.settings).items()]
    pairs += [(name, machine[name], value) for name, value in describe_machine().items()]
    others = [f"{name} {old!r} then, {new!r} now" for name, old, new in pairs if old != new]
    if others:
        raise AmpValueError(
            f"--resume: the sweep in {out!r} was another one ({'; '.join(others)}): expected the same "
            "script, arguments, options and versions; without --resume all runs are made"
        )
    return tuple(run for run in before.records if run.outcome is not Ending.INTERRUPTED)
