"""Tells once of each thing that `ampatch run --legacy` mends, with the line of the script that says it."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig

import torch

import ampatch
from ampatch.apex.legacy.table import Old

LOG = logging.getLogger("ampatch")
PASSED = (os.path.dirname(torch.__file__), os.path.dirname(ampatch.__file__), "<frozen importlib")
LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


class Told:
    """What was told of already, by the first rank alone and not again in the processes that it forks."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str | None]] = set()
        self._process = os.getpid() if os.environ.get("RANK", "0") == "0" else None

    def tell(self, row: Old, place: str | None = None) -> None:
        """Logs a warning if the script, or a file, says this first; what libraries ask for is left out."""
        key = row.name, place
        if key in self._told or self._process != os.getpid():
            return
        place = place or script_place()
        if place is not None:
            self._told.add(key)
            LOG.warning("--legacy mends %s in %s; since %s: use %s", row.name, place, row.since, row.remedy)


def script_place() -> str | None:
    """Returns the line that called torch or us, None if it is one of another library."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(PASSED):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(LIBRARIES):
        return None
    return f"{os.path.relpath(frame.f_code.co_filename)}, line {frame.f_lineno}"
