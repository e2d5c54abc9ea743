"""Finds the options of a script that would have it call `initialize`, without running it."""

from __future__ import annotations

import re
from pathlib import Path

from ampatch.apex.script import Script

# An option for mixed precision in an `add_argument` or `option`: a switch that is off without it, or a level.
SWITCH = re.compile(
    r"""(?:add_argument|option)\([^()]*?["'](--(?!no[-_])(?:[\w-]*[-_])?(?:use)?"""
    r"""(?:fp16|bf16|apex|amp|half|mixed[-_]?precision))["'][^()]*?(?:store_true|is_flag=True|BooleanOptional)""",
    re.IGNORECASE,
)
LEVEL = re.compile(
    r"""(?:add_argument|option)\([^()]*?["'](--?[\w-]*?(?:opt|amp|fp16)[-_](?:opt[-_]?)?level)["']""",
    re.IGNORECASE,
)


def find_switches(script: Script) -> list[str]:
    """Returns the options for mixed precision that a script has and was not given, as they are typed.

    Looks for calls such as `add_argument("--fp16", action="store_true")` in the script, and in the files
    beside it. An opt level comes in only where there is nothing else.
    """
    file = find_file(script)
    if not file.is_file():
        return []
    text = "\n".join(map(read, [file, *sorted(set(file.parent.glob("*.py")) - {file})]))
    found = SWITCH.findall(text) or [f"{name} O1" for name in LEVEL.findall(text)]
    given = {word.partition("=")[0] for word in script.arguments}
    return [it for it in dict.fromkeys(found) if it.split()[0] not in given]


def find_file(script: Script) -> Path:
    """Returns the file that is run; of a module, the one that is to be found from the working directory."""
    path = Path(*script.name.split(".")) if script.is_module else Path(script.name)
    if path.is_dir():
        return path / "__main__.py"
    return path.with_suffix(".py") if script.is_module else path


def read(path: Path) -> str:
    """Returns the text of a file, nothing of one that cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
