"""Where a call stood in the source, and how to make it again from there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType

from ampatch.doctor.instruments.places import INSTALLED, OURS

HERE = __file__.rpartition("frames.py")[0]
LIBRARIES = (*OURS, *INSTALLED, "<frozen ")
MOST = 30  # frames of libraries between an operation and the user's line

Frames = tuple[tuple[CodeType, int], ...]  # code and instruction, from the operation to the user's line


def capture(depth: int = 2) -> Frames:
    """Returns the frames from the caller's caller to the first of the user's own.

    Their lines are looked up by `line_of` when a step is replayed: that takes longer than all of this.
    """
    frame: FrameType | None = sys._getframe(depth)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MOST:
        code = frame.f_code
        is_user, is_here = place_of(code.co_filename)
        if not is_here:
            found.append((code, frame.f_lasti))
        if is_user:
            break
        frame = frame.f_back
    return tuple(found)


@functools.lru_cache(maxsize=1000)
def place_of(name: str) -> tuple[bool, bool]:
    """Says whether a file is the user's own, and whether it is one of a watch."""
    return not name.startswith(LIBRARIES), name.startswith(HERE)


def call_at(frames: Frames, run: Callable[[], object]) -> object:
    """Calls a function from these frames: what looks up the stack finds the files and lines they name."""
    for code, instruction in frames:
        at = _code_at(code.co_filename, line_of(code, instruction))
        run = functools.partial(FunctionType(at, {}), run)
    return run()


def line_of(code: CodeType, instruction: int) -> int:
    """Returns the line of an instruction, the first of its function where it has none."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    return next(lines, code.co_firstlineno)


@functools.lru_cache(maxsize=1000)
def _code_at(name: str, line: int) -> CodeType:
    return _call.__code__.replace(co_filename=name, co_firstlineno=line)


# fmt: off
def _call(run): return run()
# fmt: on
