"""`ampatch sweep`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from ampatch import AmpError, AmpValueError
from ampatch.commands.script import Script
from ampatch.sweeps.plan import DEFAULTS, Plan
from ampatch.sweeps.precheck import validate_source
from ampatch.sweeps.processes.stop import noting_signals
from ampatch.sweeps.terminal.stream import Stream
from ampatch.sweeps.variant import LEVELS, parse_rows
from ampatch.sweeps.verdicts.compare import SLOWER
from ampatch.sweeps.verdicts.compare import compare as compare_sweeps

SUMMARY = "train a script at several opt levels and compare speed, memory and accuracy"
HINT = "; the script's own go after --"
USAGE = """ampatch sweep [OPTIONS] SCRIPT [-- ARGS...]
       ampatch sweep [OPTIONS] -m MODULE [-- ARGS...]
       ampatch sweep --compare A B [--slower PART] [--more-memory PART] [--tolerance T]"""
EPILOG = """Everything after -- goes to the script; {seed} in it is replaced by the seed of the run, which
then leaves the seeds that the script sets alone. Exit status: 0 all went well, 1 a run failed (or, with
--compare, a level got slower or less accurate), 2 bad input, 130 after Ctrl-C."""

OF_A_PLAN = ("seeds", "repeat", "steps", "warmup", "timeout", "tolerance")
# Beside --tolerance, which belongs to both.
OF_A_SWEEP = ("script", "module", "levels", "variant", "seeds", "repeat", "steps", "warmup", "timeout", "out")
OF_A_COMPARISON = ("slower", "more_memory")
FLAGS = {"script": "SCRIPT", "module": "-m"}
# Names of arguments where an error begins with them and a value.
NUMBERS = ("seeds", "repeat", "steps", "warmup", "timeout", "tolerance", "slower", "more_memory")
ARGUMENT = re.compile(rf"(?:^|(?<=; ))({'|'.join((*NUMBERS, 'out'))})(?= [-+'\d.in])")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch sweep` accepts; the arguments of the script follow after `--`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that calls initialize")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    what = parser.add_argument_group("what is run")
    what.add_argument("--levels", metavar="L,...", help=f"parted by commas; default: {','.join(LEVELS)}")
    what.add_argument(
        "--variant",
        action="append",
        metavar="'L NAME=VALUE...'",
        help="a level with arguments of initialize, such as 'O2 loss_scale=128'; may be repeated",
    )
    seeds = f"train each with the seeds 0 to N-1; default: {DEFAULTS.seeds}"
    add_number(what, "--seeds", "N", whole, seeds)
    add_number(what, "--repeat", "N", whole, f"run all that N times; default: {DEFAULTS.repeat}")
    steps = "end a run after so many optimizer steps; default: where the script ends"
    add_number(what, "--steps", "N", whole, steps)
    add_number(what, "--timeout", "S", real, "end a run after so many seconds; default: never")
    how = parser.add_argument_group("what is made of it")
    warmup = f"first steps of a run that are not timed; default: {DEFAULTS.warmup}, of short runs less"
    add_number(how, "--warmup", "N", whole, warmup)
    tolerance = "how far from O0 counts as the same, in spreads of O0 over the seeds; "
    add_number(how, "--tolerance", "T", real, f"{tolerance}default: {DEFAULTS.tolerance}, or A's")
    how.add_argument("--out", metavar="DIR", help="write sweep.json, sweep.csv, sweep.html and logs there")
    compare = parser.add_argument_group("two sweeps")
    compare.add_argument(
        *("--compare",),
        nargs=2,
        metavar=("A", "B"),
        help="compare two sweep.json, or folders with one: B with A",
    )
    slower = f"with --compare: how much slower than A is too slow, as a part of 1; default: {SLOWER}"
    add_number(compare, "--slower", "PART", real, slower)
    memory = "with --compare: how much more memory than A is too much; default: no limit"
    add_number(compare, "--more-memory", "PART", real, memory)


def given_of(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, object]:
    """Returns those of the arguments that were given, by name."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def flags(names: Iterable[str]) -> str:
    """Returns options as they are typed."""
    return ", ".join(FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names)


def name_flags(message: str) -> str:
    """Names arguments in an error as they are typed.

    >>> name_flags("seeds 0: expected 1 or more; more_memory -1: expected a part")
    '--seeds 0: expected 1 or more; --more-memory -1: expected a part'
    """
    return ARGUMENT.sub(lambda match: flags([match[1]]), message)


def add_number(
    group: argparse._ArgumentGroup, flag: str, name: str, read: Callable[[str], float], text: str
) -> None:
    """Adds an option that takes a number; without it there is None, so that it can be told who gave it."""
    group.add_argument(flag, type=read, metavar=name, help=text)


def whole(text: str) -> int:
    """Reads a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None


def real(text: str) -> float:
    """Reads a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None


def run(arguments: argparse.Namespace) -> int:
    """Compares two sweeps, or runs one and shows it; returns the exit status."""
    try:
        return run_sweep(arguments) if arguments.compare is None else compare(arguments)
    except AmpValueError as error:
        raise AmpValueError(name_flags(str(error))) from None


def run_sweep(arguments: argparse.Namespace) -> int:
    """Runs what was asked for and shows it; returns the exit status."""
    given = given_of(arguments, OF_A_COMPARISON)
    if given:
        raise AmpValueError(f"{flags(given)} without --compare: expected the two sweeps that are compared")
    plan = read_plan(arguments)
    require_rich()
    validate_source(plan.script)
    return sweep(plan, arguments.out)


def read_plan(arguments: argparse.Namespace) -> Plan:
    """Reads what is to be run; raises AmpValueError for what cannot be."""
    levels = ",".join(LEVELS) if arguments.levels is None else arguments.levels
    rows = parse_rows([level.strip() for level in levels.split(",")], arguments.variant or ())
    return Plan(
        script=find_script(arguments),
        rows=rows,
        **given_of(arguments, OF_A_PLAN),
    )


def find_script(arguments: argparse.Namespace) -> Script:
    """Says which script was named; raises AmpValueError if there is none, or two."""
    if arguments.module is None and arguments.script is None:
        raise AmpValueError(
            "no script: expected a Python script, or -m and a module, or --compare and two sweeps"
        )
    if arguments.module is not None and arguments.script is not None:
        raise AmpValueError(f"-m {arguments.module} and {arguments.script!r}: expected one of them{HINT}")
    name = arguments.script if arguments.module is None else arguments.module
    if not name:
        raise AmpValueError("the name of the script is empty: expected a Python script, or -m and a module")
    return Script(name, arguments.script_arguments, is_module=arguments.module is not None)


def sweep(plan: Plan, out: str | None) -> int:
    """Carries out the plan, writes and shows what came of it; returns the exit status."""
    from ampatch.sweeps.campaign import Campaign
    from ampatch.sweeps.records.results import open_results
    from ampatch.sweeps.terminal import view

    # A reader that goes away, or a disk that is full, must not end what took hours.
    shown, errors = Stream(sys.stdout), view.Console(file=Stream(sys.stderr), stderr=True)
    with noting_signals() as stop, open_results(out) as results:
        if results.holds_old:
            view.say(errors, f"'{out}' holds a sweep already: it is replaced when a run has finished")
        campaign = Campaign(plan, results, stop)
        with view.progress_bar(errors, plan.count) as bar:
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
    shown.raise_error()
    return stop.status or int(any(record.failed for record in campaign.records))


def compare(arguments: argparse.Namespace) -> int:
    """Shows two sweeps side by side; returns 1 if a row got slower or less accurate, 0 otherwise."""
    given = given_of(arguments, OF_A_SWEEP)
    if given or arguments.script_arguments:
        raise AmpValueError(
            f"{flags(given) or '--'} beside --compare, which runs nothing: "
            "expected --slower, --more-memory and --tolerance alone"
        )
    from ampatch.sweeps.records.results import read_sweep

    before, after = map(read_sweep, arguments.compare)
    limits = given_of(arguments, ("tolerance", *OF_A_COMPARISON))
    comparison = compare_sweeps(before, after, names=tuple(arguments.compare), **limits)
    require_rich()
    from ampatch.sweeps.terminal import view

    shown = Stream(sys.stdout)
    view.show_comparison(view.Console(file=shown), comparison)
    shown.raise_error()
    return int(bool(comparison.regressions))


def require_rich() -> None:
    """Raises if rich, which is an extra, is missing."""
    if importlib.util.find_spec("rich") is None:
        raise AmpError("rich is not installed: pip install 'ampatch[tools]'")
