"""Warns once of each kind of misuse, at the line of the script that is to change."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

logger = logging.getLogger("ampatch")

Line = tuple[str, int]  # file and line number
_INSIDE = tuple(f"{Path(module).parent}{os.sep}" for module in (torch.__file__, __file__))


def find_line(frame: FrameType | None = None) -> Line:
    """The line of the user's source that runs: the innermost one outside of torch and ampatch."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Warner:
    """Says each kind of thing once: in the log, and as a warning that points at a line."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def forget(self) -> None:
        """Lets everything be said again."""
        self._said.clear()

    def warn(self, kind: str, text: str, line: Line | None = None) -> None:
        """Warns of a kind of misuse; `line` is the one to change, by default the one that runs."""
        if kind in self._said:
            return
        self._said.add(kind)
        file, number = line or find_line()
        logger.warning("%s:%d: %s", file, number, text)
        warnings.warn_explicit(text, UserWarning, file, number)
