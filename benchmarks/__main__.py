"""The command line: `python -m benchmarks`, from the root of the repository."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr when it starts

from ampatch.__main__ import BROKEN_PIPE, INTERRUPTED, Parser
from benchmarks import measuring, memory, micro, steps, syncs
from benchmarks.comparison import Comparison
from benchmarks.fresh import keep_memory
from benchmarks.options import Options, add_arguments, find_file_faults, parse_options

FILE_WIDTH = 140  # of tables, where the output is no terminal
MEASURES = {
    "steps": steps.measure,
    "micro": micro.measure,
    "memory": memory.measure,
    "syncs": syncs.measure,
    "measuring": measuring.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes and shows; returns the exit status. Bad input ends with status 2."""
    parser = Parser(
        prog="python -m benchmarks",
        description="Times ampatch beside float32, torch.autocast and a limit written by hand.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    options = parse_options(arguments)
    faults = options.find_faults()
    if importlib.util.find_spec("rich") is None:
        faults.append("rich is not installed: pip install -e '.[benchmarks]'")
    faults = faults or find_file_faults(arguments.out)
    if faults:
        parser.error("; ".join(faults))
    if options.keeps_memory:
        keep_memory()
    return run(options, arguments.out)


def run(options: Options, out: Path) -> int:
    """Measures, and returns the exit status; what was measured is kept, whatever ends it."""
    comparisons: list[Comparison] = []
    was_interrupted = False
    try:
        measure(options, comparisons)
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        was_shown = keep(options, out, comparisons)
    if was_interrupted:
        print(f"python -m benchmarks: interrupted; {out} has what was measured until then", file=sys.stderr)
        return INTERRUPTED
    return 0 if was_shown else BROKEN_PIPE


def measure(options: Options, comparisons: list[Comparison]) -> None:
    """Adds comparisons, group by group, and says on stderr how far it is: in lines, where that is a file."""
    from rich.console import Console

    console = Console(stderr=True)
    with silence_warnings(), console.status("") as status:
        say = status.update if console.is_terminal else console.print
        for group in options.groups:
            say(f"{group} ...")
            for comparison in MEASURES[group](options):
                comparisons.append(comparison)
                say(f"{group}: {comparison.name} is measured")


def keep(options: Options, out: Path, comparisons: list[Comparison]) -> bool:
    """Writes and shows what was measured, and returns whether someone reads what is shown."""
    from rich.console import Console

    from benchmarks import report

    try:
        report.write(out, options, comparisons)
    finally:  # also where the disk is full
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        with console.capture() as capture:
            report.show(console, comparisons)
        was_shown = print_text(capture.get())
    return was_shown


def print_text(text: str) -> bool:
    """Prints a text, and returns whether someone reads it: `head` ends as soon as it has enough."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return False
    return True


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Keeps what ampatch logs off the tables: that float16 is slow on a CPU is what is measured."""
    logger = logging.getLogger("ampatch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `timeout` sends is no less than Ctrl-C
    sys.exit(main())
