"""What a run reads: a file that an earlier run wrote while it trained has it go on from there."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampatch.sweeps.rows import Training

# Nothing that is trained is kept there, and what is there is made once for all runs.
SYSTEM = ("/proc/", "/sys/", "/dev/")  # where nothing is stored
CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll")
# What C++ opens as weights. Logs, tables and the like are read beside a run, by its user or by TensorBoard.
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".h5", ".hdf5", ".npz", ".npy", ".model")
CACHES = frozenset(("__pycache__", ".cache", ".triton", ".git", "site-packages"))
MOST_FILES = 10_000  # that are looked at in a folder, or kept in mind


class ReadWatch:
    """Watches which files are read, from now on until `close`, by Python's audit events and by the folders.

    A file was written by the earlier run that trained when the file was last changed: what a run writes
    before its first step (a download, a cache of data) holds nothing trained. Files that C++ opens raise no
    audit event; weights in the folders are told by the time of their last access, where the file system keeps
    it, whoever it was that read them.
    """

    def __init__(self, earlier: Sequence[Training], folders: Sequence[Path] = (Path(),)) -> None:
        self._earlier = earlier
        self._started = time.time_ns()
        self._old: dict[str, int] = {}  # files from before the sweep that were read: when they were changed
        self._read: dict[str, str] = {}  # files of earlier runs, with these
        self._accessed = (
            {path: status.st_atime_ns for path, status in self._trained_files(folders)} if earlier else {}
        )
        self._is_open = True

    def __call__(self, event: str, arguments: tuple) -> None:
        """Hears of an audit event; never raises, and notes the files that are opened to be read."""
        if event != "open" or not self._is_open or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        path, _, flags = arguments
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_TRUNC):
            return
        try:
            self._record(os.path.abspath(os.fsdecode(path)), os.stat(path))
        except (OSError, ValueError):  # it is not there, or no name of a file
            return

    def _record(self, path: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or is_code_or_cache(path):
            return
        if writer := self._writer(status):
            self._read.setdefault(path, writer)
        elif status.st_mtime_ns < self._started and len(self._old) < MOST_FILES:
            self._old.setdefault(path, status.st_mtime_ns)

    def _writer(self, status: os.stat_result) -> str:
        """Names the earlier run that was training when a file was changed."""
        changed = status.st_mtime_ns
        return next(
            (training.run for training in self._earlier if training.began <= changed <= training.ended), ""
        )

    def _trained_files(self, folders: Sequence[Path]) -> Iterator[tuple[str, os.stat_result]]:
        """Yields the weights in the folders that an earlier run wrote while it trained."""
        for path in files_in({folder.absolute() for folder in folders}):
            if not path.endswith(WEIGHTS):
                continue
            try:
                status = os.stat(path)
            except OSError:
                continue
            if self._writer(status):
                yield path, status

    def look(self) -> None:
        """Notes the files that were read without an audit event; call it before they can be written again."""
        for path, accessed in self._accessed.items():
            try:
                status = os.stat(path)
            except OSError:
                continue
            if status.st_atime_ns != accessed and (writer := self._writer(status)):
                self._read.setdefault(path, writer)

    def close(self, began: int | None) -> dict[str, str]:
        """Ends the watch of a run that began to train then, and says what it read: fields of a `Run`."""
        self.look()
        self._is_open = False
        resumed = [path for path, old in self._old.items() if began and is_changed(path, old, began)]
        file, writer = next(iter(self._read.items()), ("", ""))
        return {"read": shorten(file), "writer": writer, "resumed": shorten(next(iter(resumed), ""))}


class Audit:
    """Tells one listener at a time of Python's audit events, which can be listened to but never left."""

    def __init__(self) -> None:
        self.listener: ReadWatch | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open" and self.listener is not None:
            self.listener(event, arguments)


def is_changed(path: str, old: int, began: int) -> bool:
    """Says whether a file was written after a training began."""
    try:
        now = os.stat(path).st_mtime_ns
    except OSError:
        return False
    return now != old and now >= began


def is_code_or_cache(path: str) -> bool:
    """Says whether a file can hold nothing that was trained.

    >>> is_code_or_cache("/home/ada/.cache/torch/x.bin"), is_code_or_cache("/home/ada/out/last.pt")
    (True, False)
    """
    is_cache = "torchinductor_" in path or not CACHES.isdisjoint(path.split(os.sep))
    return is_cache or path.endswith(CODE) or path.startswith(SYSTEM)


def files_in(folders: set[Path]) -> Iterator[str]:
    """Yields the files below folders, but for caches, and no more than can be looked at in a moment."""
    count = 0
    for folder in folders:
        for place, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in CACHES and not name.startswith(".")]
            for name in names:
                count += 1
                if count > MOST_FILES:
                    return
                yield os.path.join(place, name)


def shorten(path: str) -> str:
    """Returns a path as it can be read from the working directory."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
