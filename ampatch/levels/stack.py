"""The calls on a thread's stack: whether one still runs, and which line of the user's is behind them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

Line = tuple[str, int]  # file and line number
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_INSIDE = (f"{Path(torch.__file__).parent}{os.sep}", PACKAGE)


def is_running(frame: FrameType | None) -> bool:
    """Whether a call is on this thread's stack."""
    if frame is None:
        return True
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def find_line(frame: FrameType | None = None) -> Line:
    """The line of the user's source that runs: the innermost one outside of torch and ampatch."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
