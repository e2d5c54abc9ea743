"""`ampatch sweep`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace

from ampatch import AmpError, AmpValueError
from ampatch.apex.run_command import DEVICE_HELP, LEGACY_HELP, UNSAFE_HELP
from ampatch.apex.script import find_script
from ampatch.sweeps.columns import LIMITED
from ampatch.sweeps.faults import ArgumentError
from ampatch.sweeps.plan import DEFAULTS, LEAST, Plan, make_plan
from ampatch.sweeps.processes.devices import Device, parse_devices, share_out
from ampatch.sweeps.processes.ranks import refuse_ranks
from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.sweep import LEVELS
from ampatch.sweeps.terminal.stream import Stream
from ampatch.sweeps.variant import list_possible, parse_rows
from ampatch.sweeps.verdicts.compare import compare as compare_sweeps
from ampatch.tools.packages import require
from ampatch.tools.stop import noting_signals

SUMMARY = "train a script at several opt levels and compare speed, memory and accuracy"
USAGE = """ampatch sweep [OPTIONS] SCRIPT [-- ARGS...]
       ampatch sweep [OPTIONS] -m MODULE [-- ARGS...]
       ampatch sweep --compare A B [--slower PART] [--more-memory PART] [--tolerance T]"""
EPILOG = """Everything after -- goes to the script; {seed} in it is replaced by the seed of the run, which
then leaves the seeds that the script sets alone. Exit status: 0 all went well, 1 a run failed (or, with
--compare, a level got slower or less accurate), 2 bad input, 130 after Ctrl-C."""

OF_A_SWEEP = (
    "script",
    "module",
    "device",
    "devices",
    "jobs",
    "legacy",
    "unsafe_load",
    "levels",
    "variant",
    "out",
    "no_page",
    "isolate",
    "resume",
)
OF_A_SWEEP = OF_A_SWEEP + tuple(LEAST)
OF_A_COMPARISON = tuple(column.limit.option for column in LIMITED)
FLAGS = {"script": "SCRIPT", "module": "-m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch sweep` accepts; the arguments of the script follow after `--`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that calls initialize")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    add_of_a_sweep(parser)
    add_of_a_comparison(parser)


def add_of_a_sweep(parser: argparse.ArgumentParser) -> None:
    """Adds what says which runs are made, and what is made of them."""
    add = parser.add_argument_group("what is run").add_argument
    add(
        "--levels",
        metavar="L,...",
        help=f"separated by commas; default: those of {','.join(LEVELS)} that run here",
    )
    variant = "a level with arguments of initialize, such as 'O2 loss_scale=128'; may be repeated"
    add("--variant", action="append", metavar="'L NAME=VALUE...'", help=variant)
    seeds = f"train each with the seeds 0 to N-1; default: {DEFAULTS.seeds}"
    add("--seeds", type=int, metavar="N", help=seeds)
    add("--repeat", type=int, metavar="N", help=f"run all that N times; default: {DEFAULTS.repeat}")
    budget = "repeat it more often, until times tell which level to take, for M minutes at the most"
    add("--budget", type=float, metavar="M", help=budget)
    steps = "end a run after so many optimizer steps; default: where the script ends"
    add("--steps", type=int, metavar="N", help=steps)
    add("--timeout", type=float, metavar="S", help="end a run after so many seconds; default: never")
    ranks = "run the script on N ranks, as `torchrun --standalone --nproc-per-node N` does"
    add("--nproc-per-node", type=int, metavar="N", help=ranks)
    devices = "make runs side by side, one on each of these GPUs"
    add("--devices", metavar="D,...", help=f"{devices}; speeds are surer without")
    jobs = "the same on the first N GPUs, or where there is none on N parts of the processors"
    add("--jobs", type=int, metavar="N", help=jobs)
    isolate = "give each run a copy of the working directory (what it writes there goes with the run)"
    add("--isolate", action="store_true", default=None, help=isolate)
    add("--device", choices=["cpu"], help=DEVICE_HELP)
    add("--legacy", action="store_true", default=None, help=LEGACY_HELP)
    add("--unsafe-load", action="store_true", default=None, help=UNSAFE_HELP)
    add = parser.add_argument_group("what is made of it").add_argument
    warmup = f"first steps of a run that are not timed; default: {DEFAULTS.warmup}; half of a short run"
    add("--warmup", type=int, metavar="N", help=warmup)
    tolerance = "how far from O0 counts as the same, in spreads of O0 over the seeds; "
    add("--tolerance", type=float, metavar="T", help=f"{tolerance}default: {DEFAULTS.tolerance}, or A's")
    out = "write sweep.json, sweep.csv, sweep.html and logs there; default: ampatch-sweep"
    add("--out", metavar="DIR", help=out)
    resume = "make the runs that an interrupted sweep of the same script and options left out"
    add("--resume", action="store_true", default=None, help=resume)
    add("--no-page", action="store_true", default=None, help="write no sweep.html, and without --out nothing")


def add_of_a_comparison(parser: argparse.ArgumentParser) -> None:
    """Adds what compares two sweeps."""
    add = parser.add_argument_group("two sweeps").add_argument
    compare = "compare two sweep.json, or folders with one: B with A"
    add("--compare", nargs=2, metavar=("A", "B"), help=compare)
    for name, column in zip(OF_A_COMPARISON, LIMITED, strict=True):
        add(flags([name]), type=float, metavar="PART", help=f"with --compare: {column.limit.meaning}")


def given_of(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, object]:
    """Returns those of the arguments that were given, by name."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def flags(names: Iterable[str]) -> str:
    """Returns options as they are typed."""
    return ", ".join(FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names)


def run(arguments: argparse.Namespace) -> int:
    """Compares two sweeps, or runs one and shows it; returns the exit status."""
    try:
        return run_sweep(arguments) if arguments.compare is None else compare(arguments)
    except ArgumentError as error:
        faults = (f"{flags([name])} {value!r}: {expected}" for name, value, expected in error.faults)
        raise AmpValueError("; ".join(faults)) from None


def run_sweep(arguments: argparse.Namespace) -> int:
    """Runs what was asked for and shows it; returns the exit status."""
    try:
        refuse_ranks()
    except AmpError:
        if os.environ["RANK"] == "0":
            raise
        return 2  # and rank 0 says why
    given = given_of(arguments, OF_A_COMPARISON)
    if given:
        raise AmpValueError(f"{flags(given)} without --compare: expected the two sweeps that are compared")
    levels = ",".join(list_possible()) if arguments.levels is None else arguments.levels
    rows = parse_rows([level.strip() for level in levels.split(",")], arguments.variant or ())
    script = find_script(arguments, ", or --compare and two sweeps")
    plan = make_plan(script, rows, **given_of(arguments, (*LEAST, "isolate")))
    if devices := find_devices(arguments):
        named = replace(plan.settings, devices=tuple(it.name for it in devices))
        plan = replace(plan, devices=devices, settings=named)
    require("rich")
    return sweep(plan, arguments.out, has_page=not arguments.no_page, resume=bool(arguments.resume))


def find_devices(arguments: argparse.Namespace) -> tuple[Device, ...]:
    """Returns the devices that runs go on side by side; none without the options."""
    given = given_of(arguments, ("devices", "jobs", "nproc_per_node"))
    if len(given) > 1:
        raise AmpValueError(f"{flags(given)}: expected one of them")
    if "devices" in given:
        return parse_devices(arguments.devices)
    return share_out(arguments.jobs, on_cpu=arguments.device == "cpu") if "jobs" in given else ()


def sweep(plan: Plan, out: str | None, *, has_page: bool, resume: bool = False) -> int:
    """Carries out the plan, writes and shows what came of it; returns the exit status."""
    from ampatch.sweeps.campaign import SweepCampaign
    from ampatch.sweeps.records.results import find_folder, find_last, open_results
    from ampatch.sweeps.terminal import view

    made: tuple[RunRecord, ...] = ()
    if resume:
        out = out or find_last()
        made = runs_to_keep(out, plan)
    elif out is None and has_page:
        out = find_folder()
    # A reader that goes away, or a disk that is full, must not end what took hours.
    shown, errors = Stream(sys.stdout), view.Console(file=Stream(sys.stderr), stderr=True)
    with noting_signals() as stop, open_results(out, has_page=has_page, keep=resume) as results:
        if results.holds_old:
            view.say(errors, f"'{out}' holds a sweep already: it is replaced when a run has finished")
        campaign = SweepCampaign(plan, results, stop, made=made)
        with view.progress_bar(errors, plan.count, plan.settings.steps) as bar:
            campaign.carry_out(bar)
        if campaign.records:
            result = campaign.sweep()
            try:
                results.save(result)
            finally:
                view.show(view.Console(file=shown), result)
        for line in results.describe():
            view.say(errors, line)
        if stop:
            view.say(errors, f"ampatch sweep: interrupted ({stop.name})")
            if out and any(not record.failed for record in campaign.records):
                view.say(errors, f"go on with: {resuming_command(out)}")
    shown.raise_error()
    return stop.status or int(any(record.failed for record in campaign.records))


def runs_to_keep(out: str, plan: Plan) -> tuple[RunRecord, ...]:
    """Returns the runs of an earlier sweep that need not be made again: all that came to an end.

    Raises AmpValueError if it was not the same sweep: of this script, with these settings and versions.
    """
    from ampatch.sweeps.environment import describe_machine
    from ampatch.sweeps.records.results import read_sweep

    before = read_sweep(out)
    settings, machine = asdict(before.settings), asdict(before.environment)
    pairs = [(name, settings[name], value) for name, value in asdict(plan.settings).items()]
    pairs += [(name, machine[name], value) for name, value in describe_machine().items()]
    others = [f"{name} {old!r} then, {new!r} now" for name, old, new in pairs if old != new]
    if others:
        raise AmpValueError(
            f"--resume: the sweep in {out!r} was another one ({'; '.join(others)}): expected the same script, "
            "arguments, options and versions; without --resume all runs are made"
        )
    return tuple(it for it in before.records if it.outcome is not Ending.INTERRUPTED)


def resuming_command(out: str) -> str:
    """Returns the command line of this process with --resume."""
    from ampatch.sweeps.environment import command_as_typed

    typed = command_as_typed()
    given = shlex.split(typed)
    added = [] if "--resume" in given else ["--resume"]
    added += [] if any(word.split("=")[0] == "--out" for word in given) else ["--out", out]
    return typed.replace("sweep", shlex.join(["sweep", *added]), 1) if added else typed


def compare(arguments: argparse.Namespace) -> int:
    """Shows two sweeps side by side; returns 1 if a row got slower or less accurate, 0 otherwise."""
    given = given_of(arguments, OF_A_SWEEP)
    given.pop("tolerance", None)  # which belongs to both
    if given or arguments.script_arguments:
        raise AmpValueError(
            f"{flags(given) or '--'} beside --compare, which runs nothing: "
            "expected --slower, --more-memory and --tolerance alone"
        )
    require("rich")
    from ampatch.sweeps.records.results import read_sweep
    from ampatch.sweeps.terminal import view

    before, after = map(read_sweep, arguments.compare)
    limits = given_of(arguments, ("tolerance", *OF_A_COMPARISON))
    comparison = compare_sweeps(before, after, names=tuple(arguments.compare), **limits)
    shown = Stream(sys.stdout)
    view.show_comparison(view.Console(file=shown), comparison)
    shown.raise_error()
    return int(bool(comparison.regressions))
