"""The folder that a sweep is written to, and the one for the logs of its runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from ampatch import AmpError, AmpValueError
from ampatch.sweeps.faults import ArgumentError
from ampatch.sweeps.records.sweep import Sweep
from ampatch.sweeps.records.sweep_file import FORMAT, from_json, to_json
from ampatch.sweeps.records.table_file import to_csv
from ampatch.sweeps.web.page import write_page
from ampatch.tools.folder import is_locked, lock
from ampatch.tools.packages import require

JSON, TABLE, PAGE = "sweep.json", "sweep.csv", "sweep.html"
LOGS, NEW_LOGS = "logs", "logs.new"
DEFAULT = "ampatch-sweep"
OUR_LOGS = "*-seed*-repeat*.log"
WRITERS = {JSON: to_json, TABLE: to_csv, PAGE: write_page}


class Results:
    """Where a sweep goes: `folder` is None if only the logs are kept.

    A sweep that is in the folder already stays, with its logs, until `replace_old`; those of the new one are
    beside them until then. `lock` keeps other sweeps out until it is closed.
    """

    def __init__(
        self,
        folder: Path | None,
        logs: Path,
        *,
        holds_old: bool = False,
        page: bool = True,
        lock: int | None = None,
    ) -> None:
        self.folder = folder
        self.logs = logs
        self.holds_old = holds_old
        self.lock = lock
        self._names = [name for name in WRITERS if page or name != PAGE]
        self._saved = False

    def replace_old(self) -> None:
        """Removes the sweep that was in the folder, and gives its place to the logs of this one."""
        if self.folder is None or not self.holds_old:
            return
        self.holds_old = False
        old, new, self.logs = self.folder / LOGS, self.logs, self.folder / LOGS
        # sweep.json is replaced in one go when it is written.
        for path in (self.folder / TABLE, self.folder / PAGE, *old.glob(OUR_LOGS)):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            old.mkdir(parents=True, exist_ok=True)
            for path in new.glob(OUR_LOGS):
                path.replace(old / path.name)
            new.rmdir()

    def save_measured(self, make: Callable[[], Sweep]) -> None:
        """Writes sweep.json, but not over an old one; a disk that is full for a while is no reason to end."""
        if self.folder is not None and not self.holds_old:
            with suppress(OSError):
                write(self.folder / JSON, to_json(make()))

    def save(self, sweep: Sweep) -> None:
        """Writes all the files, but not over an old sweep; raises AmpError if one cannot be written."""
        if self.folder is None or self.holds_old:
            return
        for name in self._names:
            try:
                write(self.folder / name, WRITERS[name](sweep))
            except OSError as error:
                raise AmpError(f"'{self.folder / name}' cannot be written: {error.strerror}") from None
        self._saved = True

    def describe(self) -> list[str]:
        """Says in lines where everything is."""
        lines = []
        if self._saved:
            lines.append(f"wrote {self.folder / JSON}, {', '.join(self._names[1:])}")
        elif self.holds_old:
            lines.append(f"'{self.folder}' keeps the sweep that it held: no run of this one finished")
        if self.logs.is_dir() and any(self.logs.iterdir()):
            lines.append(f"logs: {self.logs}")
        if self._saved and PAGE in self._names:
            lines.append(f"the page: open {self.folder / PAGE}")
        return lines


@contextmanager
def open_results(out: str | None, *, has_page: bool = True, keep: bool = False) -> Iterator[Results]:
    """Makes the folders for a sweep, and removes that of the logs if there are none in the end.

    With `keep` the sweep that is there goes on.

    Raises AmpValueError if files cannot be written there.
    """
    if out is None:
        results = Results(None, Path(tempfile.mkdtemp(prefix=f"{DEFAULT}-")))
    else:
        results = prepare(out, has_page, keep)
    try:
        yield results
    finally:
        with suppress(OSError):  # which says that there are logs
            results.logs.rmdir()
        if results.lock is not None:
            os.close(results.lock)


def find_folder() -> str:
    """Returns the folder for a sweep for which none was asked: that of an earlier one, or a new one."""
    if not os.access(".", os.W_OK):
        return tempfile.mkdtemp(prefix=f"{DEFAULT}-")
    names = (DEFAULT if number == 1 else f"{DEFAULT}-{number}" for number in count(1))
    return next(name for name in names if is_free(Path(name)))


def find_last() -> str:
    """Returns the folder of the last sweep for which none was asked; raises AmpValueError without any."""
    folders = [path.parent for path in Path().glob(f"{DEFAULT}*/{JSON}") if not is_foreign(path)]
    if not folders:
        raise AmpValueError(f"--resume: there is no {DEFAULT} with a {JSON} here: expected one, or --out")
    return str(max(folders, key=lambda it: (it / JSON).stat().st_mtime_ns))


def is_free(folder: Path) -> bool:
    """Says whether there is nothing of that name, or a folder with a sweep, or with logs of one at most.

    A folder is not free in which a sweep is on.
    """
    if not folder.is_dir():
        return not folder.exists()
    if is_locked(folder):
        return False
    if (folder / JSON).exists():
        return not is_foreign(folder / JSON)
    return {path.name for path in folder.iterdir()} <= {LOGS}


def is_foreign(path: Path) -> bool:
    """Says whether a sweep.json is of something else."""
    return path.is_file() and f'"{FORMAT}"' not in path.read_text(encoding="utf-8", errors="replace")


def prepare(out: str, has_page: bool, keep: bool) -> Results:
    """Makes the folders, and tries whether files can be written there; raises AmpValueError if not."""
    if has_page:
        require("jinja2")  # of the page, which is written when all runs are through
    folder, expected = Path(out), "expected a folder, or a place for a new one"
    if is_foreign(folder / JSON):
        raise ArgumentError([("out", out, f"expected a folder without a {JSON} of something else")])
    held = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_locked(folder):
            raise ArgumentError([("out", out, "another sweep writes there: expected a folder of its own")])
        with suppress(OSError):  # where there are no locks
            held = lock(folder)
        holds_old = (folder / JSON).exists() and not keep
        logs = folder / (NEW_LOGS if holds_old else LOGS)
        logs.mkdir(parents=True, exist_ok=True)
        for place in (folder, logs):
            tempfile.TemporaryFile(dir=place).close()
        for path in () if keep else logs.glob(OUR_LOGS):  # of a sweep that did not come to its first result
            path.unlink()
    except OSError as error:
        if held is not None:
            os.close(held)
        raise ArgumentError([("out", out, f"{expected} ({error.strerror})")]) from None
    return Results(folder, logs, holds_old=holds_old, page=has_page, lock=held)


def write(path: Path, text: str) -> None:
    """Writes a file in one go: whoever reads it meanwhile finds the whole of the old or of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a script may have cleared its output
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_sweep(name: str) -> Sweep:
    """Reads a sweep.json, or the one in a folder; raises AmpValueError if there is none."""
    path = Path(name) / JSON if Path(name).is_dir() else Path(name)
    try:
        return from_json(path.read_text(encoding="utf-8"), repr(str(path)))
    except (OSError, UnicodeDecodeError) as error:
        expected = "expected a sweep.json, or a folder that `ampatch sweep --out` wrote"
        raise AmpValueError(f"{str(path)!r} cannot be read ({error}): {expected}") from None
