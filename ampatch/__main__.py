"""The command line: `ampatch COMMAND ...`, the same as `python -m ampatch COMMAND ...`."""

import argparse
import difflib
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ampatch import AmpError, __version__
from ampatch.apex import checking as check
from ampatch.apex import run_command as run
from ampatch.apex.script import HINT
from ampatch.doctor import command as doctor
from ampatch.sweeps import command as sweep
from ampatch.testing import lists_command as lists

BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
NEARLY_THE_SAME = 0.8  # as options are that are a letter or two apart

VERSIONS = f"ampatch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"

Parts = tuple[list[str], tuple[str, ...]]


def split_at_dashes(argv: Sequence[str]) -> Parts:
    """Separates our arguments from those of the script, which come after `--`.

    By hand: argparse gives up its optional positionals at the first option it meets.

    >>> split_at_dashes(["sweep", "train.py", "--", "--epochs", "3"])
    (['sweep', 'train.py'], ('--epochs', '3'))
    """
    if "--" not in argv:
        return list(argv), ()
    place = list(argv).index("--")
    return list(argv[:place]), tuple(argv[place + 1 :])


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: what it is called, what it accepts and what it does.

    `run` returns the exit status, or what runs a script and returns it: what a script raises is its
    own. `split` separates our arguments from the script's; `hint` says where those go.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | Callable[[], int]]
    split: Callable[[Sequence[str]], Parts] = split_at_dashes
    hint: str = ""


COMMANDS = (
    Command("run", run.SUMMARY, run.add_arguments, run.run, run.split, run.HINT),
    Command("check", check.SUMMARY, check.add_arguments, check.run),
    Command("sweep", sweep.SUMMARY, sweep.add_arguments, sweep.run, hint=HINT),
    Command("doctor", doctor.SUMMARY, doctor.add_arguments, doctor.run, hint=HINT),
    Command("lists", lists.SUMMARY, lists.add_arguments, lists.run),
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and says what is wrong and where help is."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (help: {self.prog} --help)\n")

    def describe_unknown(self, words: Sequence[str]) -> str:
        """Says which arguments are not known, or of the first that is nearly an option, which it is.

        >>> Parser(add_help=True).describe_unknown(["--hepl", "x.py"])
        'unrecognized argument --hepl (did you mean --help?)'
        """
        for word in words:
            option = word.partition("=")[0]
            close = difflib.get_close_matches(option, self._option_string_actions, 1, NEARLY_THE_SAME)
            if option.startswith("--") and close:
                # What follows may be its value.
                return f"unrecognized argument {option} (did you mean {close[0]}?)"
        return f"unrecognized arguments: {' '.join(words)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0, 1 (something failed) or 2 (bad input)."""
    argv = sys.argv[1:] if argv is None else argv
    # torch.distributed.launch gives it to what it starts, and that is us.
    rank = [word for word in argv[:1] if re.fullmatch(r"--local[-_]rank=\d+", word)]
    own, script_arguments = split(argv[len(rank) :])
    parser = build_parser()
    if not own:
        parser.print_help()
        return 0
    if own[0].startswith("-") and own[0] not in parser._option_string_actions:
        parser.error(parser.describe_unknown(own))
    if fault := find_command_fault(own[0]):
        parser.error(fault)
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        arguments.parser.error(arguments.parser.describe_unknown(unknown) + arguments.command.hint)
    arguments.script_arguments = (*rank, *script_arguments)
    outcome = run_command(arguments)
    return outcome if isinstance(outcome, int) else outcome()


def find_command_fault(word: str) -> str | None:
    """Says of a first word that is no subcommand which one is meant, or which there are.

    >>> find_command_fault("swep")
    "unknown command 'swep' (did you mean sweep?)"
    """
    names = [command.name for command in COMMANDS]
    if word.startswith("-") or word in names:
        return None
    close = difflib.get_close_matches(word, names, 1)
    return f"unknown command {word!r} " + (
        f"(did you mean {close[0]}?)" if close else f"(choose from {', '.join(names)})"
    )


def run_command(arguments: argparse.Namespace) -> int | Callable[[], int]:
    """Runs the subcommand, and turns what stops it into one line and an exit status."""
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


def split(argv: Sequence[str]) -> Parts:
    """Separates our arguments from those of the script, as the subcommand does."""
    command = next((command for command in COMMANDS if [command.name] == list(argv[:1])), None)
    return command.split(argv) if command else split_at_dashes(argv)


def build_parser() -> Parser:
    """Builds the parser out of `COMMANDS`."""
    parser = Parser(prog="ampatch", description="Mixed precision for PyTorch training scripts.")
    parser.add_argument("--version", action="version", version=VERSIONS)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
