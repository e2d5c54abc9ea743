"""The command line: `ampatch COMMAND ...`, the same as `python -m ampatch COMMAND ...`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ampatch import AmpError, __version__, show_lists
from ampatch.sweep import command as sweep

BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: what it is called, what it accepts and what it does."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = (
    Command("lists", show_lists.SUMMARY, show_lists.add_arguments, show_lists.run),
    Command("sweep", sweep.SUMMARY, sweep.add_arguments, sweep.run),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and says what is wrong and where help is."""
        hint = "; the script's own go after --" if message.startswith("unrecognized arguments") else ""
        self.exit(BAD_INPUT, f"{self.prog}: {message}{hint} (help: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0, 1 (something failed) or 2 (bad input)."""
    own, script_arguments = split_at_dashes(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(own)
    arguments.script_arguments = script_arguments
    try:
        return arguments.command.run(arguments)
    except AmpError as error:
        print(f"ampatch {arguments.command.name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"ampatch {arguments.command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return BROKEN_PIPE


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Parts our arguments from those of the script, which come after `--`.

    By hand: argparse gives up its optional positionals at the first option it meets.

    >>> split_at_dashes(["sweep", "train.py", "--", "--epochs", "3"])
    (['sweep', 'train.py'], ('--epochs', '3'))
    """
    if "--" not in argv:
        return list(argv), ()
    place = list(argv).index("--")
    return list(argv[:place]), tuple(argv[place + 1 :])


def build_parser() -> Parser:
    """Builds the parser out of `COMMANDS`."""
    parser = Parser(prog="ampatch", description="Mixed precision for PyTorch training scripts.")
    parser.add_argument("--version", action="version", version=f"ampatch {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser
