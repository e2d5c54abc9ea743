"""Finds the options of a script that would have it call `initialize`, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ampatch.apex.script import Script

LEVEL = re.compile(r"--?\w*?(opt|amp|fp16)[-_]?(opt[-_]?)?level", re.I)
SWITCH = re.compile(r"--?(?!-|no[-_])(.*[-_])?(use)?(fp16|bf16|apex|amp|half|mixed[-_]?precision)", re.I)
ON = ("store_true", "BooleanOptionalAction")


def find_switches(script: Script) -> list[str]:
    """Returns the options for mixed precision that a script has and was not given, as they are typed.

    Looks for calls such as `add_argument("--fp16", action="store_true")` in the script, and in the modules
    beside it that it imports. An opt level comes in only where there is nothing else, and none by default.
    """
    calls = [call for tree in trees_of(find_file(script)) for call in ast.walk(tree) if is_option(call)]
    switches = [name for call in calls if is_switch(call) and (name := named(call, SWITCH))]
    levels = [f"{name} O1" for call in calls if not keyword(call, "default") and (name := named(call, LEVEL))]
    given = {word.partition("=")[0] for word in script.arguments}
    return [it for it in dict.fromkeys(switches or levels) if it.split()[0] not in given]


def find_file(script: Script) -> Path:
    """Returns the file that is run; of a module, the one that is found from the working directory."""
    path = Path(*script.name.split(".")) if script.is_module else Path(script.name)
    if path.is_dir():
        return path / "__main__.py"
    return path.with_suffix(".py") if script.is_module else path


def trees_of(file: Path) -> Iterator[ast.Module]:
    """Yields the script, and the modules beside it that it imports; not what cannot be read."""
    for tree in parse(file):
        yield tree
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                for name in filter(None, names):
                    yield from parse(file.parent.joinpath(*name.split(".")).with_suffix(".py"))


def parse(file: Path) -> Iterator[ast.Module]:
    """Yields the tree of a file, if there is one."""
    try:
        yield ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return


def is_option(node: ast.AST) -> bool:
    """Says whether a node is the call that adds an option: of argparse, click, or what works as they do."""
    name = getattr(node.func, "attr", None) if isinstance(node, ast.Call) else None
    return name in ("add_argument", "option")


def named(call: ast.Call, pattern: re.Pattern[str]) -> str | None:
    """Returns the longest name of an option that matches.

    >>> named(ast.parse("add('-f', '--fp16')").body[0].value, SWITCH)
    '--fp16'
    """
    names = [it.value for it in call.args if isinstance(it, ast.Constant) and isinstance(it.value, str)]
    return max((name for name in names if pattern.fullmatch(name)), key=len, default=None)


def is_switch(call: ast.Call) -> bool:
    """Says whether an option takes no value, and is off without it."""
    return keyword(call, "action") in ON or keyword(call, "is_flag") is True


def keyword(call: ast.Call, name: str) -> object:
    """Returns a constant that is given by name, or the last name of what else is given; None without it."""
    found = next((it.value for it in call.keywords if it.arg == name), None)
    return found.value if isinstance(found, ast.Constant) else getattr(found, "attr", found)
