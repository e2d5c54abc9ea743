"""The folder that a sweep is written to, with the logs of its runs; what is there is never replaced."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from ampatch import AmpError, AmpValueError
from ampatch.sweeps.files import FORMAT, JSON, to_csv, to_json
from ampatch.sweeps.rows import Sweep
from ampatch.sweeps.show.page import write_page
from ampatch.tools.folder import is_locked, lock

TABLE, PAGE, LOGS = "sweep.csv", "sweep.html", "logs"
DEFAULT = "ampatch-sweep"
WRITERS = {JSON: to_json, TABLE: to_csv, PAGE: write_page}


class Results:
    """Where a sweep goes: `folder` is None if only the logs are kept."""

    def __init__(self, folder: Path | None, logs: Path) -> None:
        self.folder = folder
        self.logs = logs
        self._saved = False

    def save_measured(self, make: Callable[[], Sweep]) -> None:
        """Writes sweep.json; a disk that is full for a while is no reason to end."""
        if self.folder is not None:
            with suppress(OSError):
                write(self.folder / JSON, to_json(make()))

    def save(self, sweep: Sweep) -> None:
        """Writes all the files; raises AmpError if one cannot be written."""
        for name, writer in WRITERS.items() if self.folder else ():
            try:
                write(self.folder / name, writer(sweep))
            except OSError as error:
                raise AmpError(f"'{self.folder / name}' cannot be written: {error.strerror}") from None
        self._saved = self.folder is not None

    def describe(self) -> list[str]:
        """Says in lines where everything is."""
        lines = [f"wrote {self.folder / JSON}, {TABLE}, {PAGE}"] if self._saved else []
        if self.logs.is_dir() and any(self.logs.iterdir()):
            lines.append(f"logs: {self.logs}")
        return [*lines, f"the page: open {self.folder / PAGE}"] if self._saved else lines


@contextmanager
def open_results(out: str | None, *, keep: bool = False) -> Iterator[Results]:
    """Makes the folders for a sweep, which has them for itself, and removes those that stay empty.

    With `keep` the sweep that is there goes on. Raises AmpValueError if there is one otherwise, if another
    one is on there, or if files cannot be written.
    """
    if out is None:
        results, held = Results(None, Path(tempfile.mkdtemp(prefix=f"{DEFAULT}-"))), None
    else:
        results, held = prepare(Path(out), keep)
    try:
        yield results
    finally:
        for folder in (results.logs, results.folder):
            with suppress(OSError, TypeError):  # which says that there is something in it
                os.rmdir(folder)
        if held is not None:
            os.close(held)


def prepare(folder: Path, keep: bool) -> tuple[Results, int | None]:
    """Makes the folders, locks them, and tries whether files can be written there."""
    fault, held = f"--out {str(folder)!r}:", None
    if (folder / JSON).exists() and not keep:
        raise AmpValueError(
            f"{fault} a {JSON} is there already: expected another folder, or --resume to go on with it"
        )
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        if is_locked(folder):
            raise AmpValueError(f"{fault} another sweep writes there: expected a folder of its own")
        with suppress(OSError):  # where there are no locks
            held = lock(folder)
        for place in (folder, folder / LOGS):
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        if held is not None:
            os.close(held)
        expected = "expected a folder, or a place for a new one"
        raise AmpValueError(f"{fault} {expected} ({error.strerror})") from None
    return Results(folder, folder / LOGS), held


def find_folder() -> str:
    """Returns the folder for a sweep for which none was asked: the first name that is not taken."""
    if not os.access(".", os.W_OK):
        return tempfile.mkdtemp(prefix=f"{DEFAULT}-")
    names = (DEFAULT if number == 1 else f"{DEFAULT}-{number}" for number in count(1))
    return next(name for name in names if not Path(name).exists())


def find_last() -> str:
    """Returns the folder of the last sweep for which none was asked; raises AmpValueError without any."""
    files = [path for path in Path().glob(f"{DEFAULT}*/{JSON}") if FORMAT in path.read_text(errors="replace")]
    if not files:
        raise AmpValueError(f"--resume: there is no {DEFAULT} with a {JSON} here: expected one, or --out")
    return str(max(files, key=lambda it: it.stat().st_mtime_ns).parent)


def write(path: Path, text: str) -> None:
    """Writes a file in one go: whoever reads it meanwhile finds the whole of the old or of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a script may have cleared its output
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
