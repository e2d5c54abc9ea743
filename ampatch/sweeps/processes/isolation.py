"""A copy of the working directory for each run, so that all of them find what the first one found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ampatch import AmpValueError
from ampatch.apex.script import Script

MOST_BYTES = 2**30  # of a copy, for each run in turn
FICLONE = 0x40049409  # of Linux: the copy shares its blocks with the original until one of them is written
LEFT_OUT = ("__pycache__", ".git", "ampatch-sweep", "ampatch-sweep-*", "ampatch-run-*")
ignore = shutil.ignore_patterns(*LEFT_OUT)


def isolated(script: Script) -> Script:
    """Returns the script as a run finds it in its copy of the working directory.

    Raises AmpValueError if it is not in that folder, or if the folder is too large to be copied.
    """
    here = Path.cwd()
    path = Path(script.name).absolute()
    if not script.is_module and not path.is_relative_to(here):
        raise AmpValueError(
            f"--isolate copies the working directory for each run, and {script.name!r} is not in it: start "
            "the sweep in the folder of the script"
        )
    size = sum(sizes_below(here))
    if size > MOST_BYTES:
        raise AmpValueError(
            f"--isolate copies the working directory for each run, which holds {size / 2**30:.1f} GiB: "
            f"expected {MOST_BYTES / 2**30:.0f} GiB at the most; put a symbolic link in the place of the "
            "data, or give each run files of its own by {run} in the arguments of the script"
        )
    return script if script.is_module else replace(script, name=str(path.relative_to(here)))


def sizes_below(folder: Path) -> Iterator[int]:
    """Yields the sizes of the files that would be copied."""
    for place, below, names in os.walk(folder):
        skipped = ignore(place, [*below, *names])
        below[:] = [name for name in below if name not in skipped]
        for name in set(names) - skipped:
            with suppress(OSError):
                yield os.lstat(os.path.join(place, name)).st_size


def copy_working_directory(target: Path) -> Path:
    """Copies the files, in blocks that are shared until they are written where the file system can."""
    return Path(shutil.copytree(Path.cwd(), target, symlinks=True, ignore=ignore, copy_function=clone))


def clone(source: str, target: str) -> None:
    """Copies a file with its times, which tell what is from before the sweep."""
    try:
        import fcntl

        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        shutil.copystat(source, target)
    except (OSError, ImportError):
        shutil.copy2(source, target)
