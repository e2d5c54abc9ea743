"""The calls on a thread's stack: whether one still runs, and which line of the user's is behind them."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from types import FrameType

import torch

logger = logging.getLogger("ampatch")
LOG_ALONE = -1  # the verbosity of calls that print nothing, as at 0, and log as at 1
# For what a script asked for otherwise than by `initialize`, whose verbosity 0 does not silence it.
asked = logging.LoggerAdapter(logger, {"is_asked": True})

Line = tuple[str, int]  # file and line number
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Packages whose lines are not the user's: trainers, and what is around functions. Around deprecated ones it
# is one of the last three, by the version of Python.
_TRAINERS = ("accelerate", "lightning", "pytorch_lightning", "transformers")
_OTHERS = (*_TRAINERS, "contextlib", "functools", "typing_extensions", "warnings", "_py_warnings")
_INSIDE = (f"{Path(torch.__file__).parent}{os.sep}", PACKAGE)


def is_running(frame: FrameType | None) -> bool:
    return frame is None or _is_below(frame, sys._getframe(1))


def _is_below(frame: FrameType | None, top: FrameType) -> bool:
    caller: FrameType | None = top
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


class StepLock:
    """Lets one thread at a time change what threads share; entered, it says whether no other is in a step.

    Nobody waits for a step. It may raise, and then only the stacks tell that it is over.
    """

    def __init__(self) -> None:
        self.mutex = RLock()  # alone, for who knows that no other thread steps
        self.step: FrameType | None = None  # the call that runs a step

    def __enter__(self) -> bool:
        self.mutex.acquire()
        step = self.step
        return is_running(step) or not any(_is_below(step, top) for top in sys._current_frames().values())

    def __exit__(self, *_: object) -> None:
        self.mutex.release()


def wrap_closure(args: tuple, kwargs: dict, run: Callable[..., object]) -> tuple[tuple, dict] | None:
    """Returns the arguments of a step, with `run(closure)` in place of its closure; None where it has none.

    Hooks of `step` see the optimizer itself as the first argument.
    """
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": functools.partial(run, kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], functools.partial(run, args[1]), *args[2:]), kwargs
    return None


def find_line() -> Line:
    """The line of the user's source that runs: the innermost one outside of torch, ampatch and trainers."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def warn(text: str, line: Line | None = None) -> None:
    """Says what a script does wrong: in the log, and as a warning that points at the line to change."""
    file, number = line or find_line()
    logger.warning("%s:%d: %s", file, number, text)
    warnings.warn_explicit(text, UserWarning, file, number)


def _is_inside(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _OTHERS or frame.f_code.co_filename.startswith(_INSIDE)
