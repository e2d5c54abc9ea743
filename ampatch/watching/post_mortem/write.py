"""Writes a post-mortem whole or not at all, and keeps the folder small; whatever fails, training goes on."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ampatch.errors import AmpTypeError

logger = logging.getLogger("ampatch")

VARIABLE = "AMPATCH_POST_MORTEM"  # a folder, or 0 for none
FOLDER = "ampatch-post-mortem"  # in the current folder of the process, for who names none
MOST_FILES = 16  # in a folder: the oldest of ours go
OFF = ("0", "", "off", "no", "false")


def parse_post_mortem(value: object) -> Path | None:
    """Reads what a user may pass as `post_mortem`: the folder to write to, None for nowhere.

    None is the folder that the environment names; True as well, or else `ampatch-post-mortem`.
    """
    if value is False:
        return None
    if value is True or value is None:
        named = os.environ.get(VARIABLE, FOLDER if value else "")
        return None if named.lower() in OFF else Path(named)
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    raise AmpTypeError(f"post_mortem is {value!r}: expected True, False or a folder to write to")


def write(folder: Path, rank: int, gather: Callable[[], object]) -> Path | None:
    """Writes what `gather` returns into a new file; returns its path, or None and logs why there is none."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # one reading: two may stand a second apart
    moment = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{nanoseconds:09d}"
    path = folder / f"post-mortem-{moment}-rank{rank}-{os.getpid()}.pt"
    part = path.with_suffix(".part")
    try:
        torch.save(gather(), buffer := io.BytesIO())
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with open(part, "xb", opener=open_private) as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except Exception as error:  # a full disk, or a device that has no memory left
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        kind = type(error).__name__
        logger.error("no post-mortem was written to %s: %s: %s; training goes on", folder, kind, error)
        return None
    remove_oldest(folder, path)
    return path.absolute()


def open_private(path: str, flags: int) -> int:
    """Opens a file that others cannot read: it holds data of a batch."""
    return os.open(path, flags, 0o600)


def remove_oldest(folder: Path, newest: Path) -> None:
    """Leaves so many of our files, and of what processes that were killed left unfinished.

    Those stay whose times are nearest to that of the newest: a clock that went back makes it the oldest.
    """
    with contextlib.suppress(OSError):
        found = [path for end in ("pt", "part") for path in folder.glob(f"post-mortem-*-rank*.{end}")]
        now = newest.stat().st_mtime_ns
        for path in sorted(found, key=lambda path: abs(path.stat().st_mtime_ns - now))[MOST_FILES:]:
            path.unlink(missing_ok=True)
