"""Gives a script the local rank as launchers of earlier years passed it: as an option, or in `sys.argv`."""

from __future__ import annotations

import argparse
import ast
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress

from ampatch.apex.changes import Changes, is_library, script_frame
from ampatch.apex.legacy import pattern_rows as rows
from ampatch.apex.legacy.finding import READS_RANK
from ampatch.apex.legacy.mending.names import Notices
from ampatch.apex.legacy.patterns import find_rank

OPTION = re.compile(r"add_argument\([^)]*local[-_]rank")
RANKS = frozenset({"--local_rank", "--local-rank"})


def parse_rank(
    parse: Callable,
    notices: Notices,
    /,
    self: argparse.ArgumentParser,
    args: Iterable[str] | None = None,
    namespace: object = None,
) -> object:
    """Gives an option --local_rank or --local-rank what launchers gave it, who set LOCAL_RANK today.

    As they wrote into `sys.argv`, a list that does not begin or end with that is parsed as it is.
    """
    argv = sys.argv[1:]
    words = argv if args is None else list(args)
    has_argv = words == argv or (argv and argv in (words[: len(argv)], words[-len(argv) :]))
    if not has_argv and not isinstance(args, Rest):
        return parse(self, words, namespace)
    said = {word.partition("=")[0] for word in words}
    filled: list[argparse.Action] = []
    with Changes() as changes:
        for parser in parsers(self):
            own = [action for action in parser._actions if is_rank(action)]
            filled += (each for each in own if give_rank(changes, each, said, namespace))
            options = parser._option_string_actions
            for word in (RANKS & said).difference(options) if own else ():
                options[word] = own[0]
                changes.callback(options.pop, word)
                filled.append(own[0])
        parsed, rest = parse(self, words, namespace)
    frame = script_frame()
    text = "".join(linecache.getlines(frame.f_code.co_filename)) if frame and filled else ""
    if any(hasattr(parsed, action.dest) for action in filled) and not READS_RANK.search(text):
        notices.warn(rows.RANK)
    return parsed, Rest(rest)


class Rest(list):
    """Words of `sys.argv` that a parser did not know, which scripts give to the next."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser, and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in {*action.choices.values()}:
                yield from parsers(below)


def is_rank(action: argparse.Action) -> bool:
    """Whether an option is that for the local rank."""
    names = {action.dest, *(word.strip("-").replace("-", "_") for word in action.option_strings)}
    return bool(action.option_strings) and "local_rank" in names


def give_rank(changes: Changes, action: argparse.Action, said: Set[str], namespace: object) -> bool:
    """Has LOCAL_RANK be the value of an option that is not said; returns whether a rank has another there."""
    rank = os.environ.get("LOCAL_RANK")
    if not rank or said & {*action.option_strings, *RANKS} or hasattr(namespace, action.dest):
        return False
    is_alone = rank != "0" or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    if is_alone and str(action.default) == rank and not action.required:
        return False
    changes.set_attribute(action, "default", rank)
    changes.set_attribute(action, "required", False)
    return True


def put_rank_first(notices: Notices, source: bytes, path: str) -> None:
    """Gives `sys.argv` the rank as launchers did, for a script that looks there without argparse."""
    words, text = sys.argv[1:], source.decode("latin-1")
    said = [word for word in words[:1] if word.startswith("--local-rank=")]
    rank = said[0].partition("=")[2] if said else os.environ.get("LOCAL_RANK")
    is_done = not rank or READS_RANK.search(text) or any(word.startswith("--local_rank") for word in words)
    is_none = not re.search("local[-_]rank", text) or OPTION.search(text)
    if is_done or is_none or is_library(path):
        return
    with suppress(SyntaxError, ValueError):
        spelled = next(filter(None, map(find_rank, ast.walk(ast.parse(source)))), None)
        if spelled and said != [word := f"{spelled}={rank}"]:
            sys.argv[1 : 1 + len(said)] = [word]
            notices.warn(rows.RANK, os.path.relpath(path))
