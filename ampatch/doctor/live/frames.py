"""Where a call stood in the source, and how to make it again as if it stood there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, FunctionType

from ampatch.doctor.instruments.places import INSTALLED, OURS

HERE = __file__.rpartition("frames.py")[0]
MOST = 30  # frames of libraries between an operation and the user's line

Frames = tuple[tuple[str, int], ...]  # (file, line), from the operation to the user's line


def capture(depth: int = 2) -> Frames:
    """Returns the frames from the caller's caller to the first of the user's own."""
    frame: FrameType | None = sys._getframe(depth)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < MOST:
        name = frame.f_code.co_filename
        if not name.startswith(HERE):
            found.append((name, frame.f_lineno))
            if not name.startswith((*OURS, *INSTALLED, "<frozen ")):
                break
        frame = frame.f_back
    return tuple(found)


def call_at(frames: Frames, run: Callable[[], object]) -> object:
    """Calls a function from these frames: what looks up the stack finds the files and lines they name."""
    for name, line in frames:
        run = functools.partial(FunctionType(_code_at(name, line), {}), run)
    return run()


@functools.lru_cache(maxsize=1000)
def _code_at(name: str, line: int) -> object:
    return _call.__code__.replace(co_filename=name, co_firstlineno=line)


# fmt: off
def _call(run): return run()
# fmt: on
