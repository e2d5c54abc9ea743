"""Tells a finder what it is asked for: an import, of which whole name, or only a look."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

BOOTSTRAP = "<frozen importlib._bootstrap>"


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement that is being executed.

    `name` is the whole name it says, where a finder is asked for the packages around it first;
    `is_from` says that the last part of the name comes after `from package import`.
    """

    name: str
    is_from: bool


def current_import(name: str) -> Import | None:
    """Returns the import for which a finder is now asked for a module; None if it is only looked for.

    `importlib.util.find_spec` must answer None for what is not there, and an import must raise.
    A finder is told nothing that would part them, but its callers do, the functions of the import system.
    """
    frames = list(bootstrap_frames(sys._getframe(1)))
    if not any(frame.f_code.co_name == "_find_and_load_unlocked" for frame in frames):
        return None
    asked = [frame.f_locals.get("name") for frame in frames]
    longest = max((each for each in asked if is_below(each, name)), key=len, default=name)
    return Import(longest, any(frame.f_code.co_name == "_handle_fromlist" for frame in frames))


def is_below(asked: object, name: str) -> bool:
    """Says whether `asked` is the name of a module or of one below it."""
    return isinstance(asked, str) and f"{asked}.".startswith(f"{name}.")


def bootstrap_frames(frame: FrameType | None) -> list[FrameType]:
    """Returns the frames of the import system that called us, without what called the import system."""
    while frame is not None and frame.f_code.co_filename != BOOTSTRAP:
        frame = frame.f_back
    found = []
    while frame is not None and frame.f_code.co_filename == BOOTSTRAP:
        found.append(frame)
        frame = frame.f_back
    return found
