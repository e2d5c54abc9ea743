"""Where a call stood in the source, which variables were around it, and how to make it again from there.

It keeps the plain variables of the user's own files, such as the number of the step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType

from torch.nn import Module

from ampatch.doctor.instruments.places import INSTALLED, OURS

HERE = __file__.rpartition("frames.py")[0]
LIBRARIES = (*OURS, *INSTALLED, "<frozen ")
MOST = 30  # frames of libraries between an operation and the user's line

PLAIN = (int, float, bool, str, type(None))
MOST_ENTRIES = 30  # of a dictionary

Space = dict[str, object]
Surroundings = list[tuple[Space, Space]]  # names and their values: where they are kept, and what they were
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


def files_of(model: Module) -> list[Space]:
    """Returns the global variables of the user's files that a model's classes stand in."""
    found = {}
    for kind in {type(module) for module in model.modules()}:
        function = getattr(kind.forward, "__wrapped__", kind.forward)
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(LIBRARIES):
            found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def take(spaces: list[Space]) -> Surroundings:
    """Returns plain variables, and small dictionaries of them, as they are now."""
    found = []
    for space in spaces:
        found.append((space, plain_in(space)))
        held = [value for value in space.values() if type(value) is dict and len(value) <= MOST_ENTRIES]
        found += [(each, plain_in(each)) for each in held]
    return found


def plain_in(space: Space) -> Space:
    """Returns the variables that are numbers, strings or None."""
    return {name: value for name, value in space.items() if type(value) in PLAIN}


@contextmanager
def restored(taken: Surroundings) -> Iterator[None]:
    """Has variables be what they were; afterwards they are as they are now."""
    now = [(space, plain_in(space)) for space, _ in taken]
    for space, values in taken:
        space.update(values)
    try:
        yield
    finally:
        for space, values in now:
            for name in plain_in(space).keys() - values.keys():
                del space[name]
            space.update(values)
