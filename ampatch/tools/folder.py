"""Temporary folders that are known to be in use, so that those of processes that were killed can go."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# A file in a folder, locked while the folder is in use; machines that share a disk may not share locks.
HELD = f"held-on-{platform.node()}"


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Makes a folder, whose file `HELD` is locked while the block runs, and removes those that were left."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=f"ampatch-{kind}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with ExitStack() as stack:
            with suppress(OSError):  # where there are no locks, nobody looks for any
                (folder / "new").touch()
                stack.callback(os.close, lock(folder / "new"))
                (folder / "new").rename(folder / HELD)  # locked from the first
            yield folder


def remove_left() -> None:
    """Removes the folders of processes that were killed."""
    for file in Path(tempfile.gettempdir()).glob(f"ampatch-*/{HELD}"):
        with suppress(OSError), ExitStack() as stack:
            stack.callback(os.close, lock(file))
            shutil.rmtree(file.parent, ignore_errors=True)


def lock(path: Path) -> int:
    """Locks a file or folder until what it returns is closed, or this process has ended.

    Raises BlockingIOError if another holds it, another OSError where there are no locks.
    """
    if os.name != "posix":
        raise OSError("no locks of this kind")
    import fcntl

    # A lock of a file takes the right to write on some file systems; a folder cannot be opened so.
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def is_locked(path: Path) -> bool:
    """Says whether somebody holds a file or folder locked."""
    try:
        os.close(lock(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
