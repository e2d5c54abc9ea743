"""The folder of a sweep: its page, its logs, and sweep.json, which any program reads; none is replaced.

sweep.json is one object: `format` and `version`, then the fields of `Sweep` by name. Numbers that are not
finite, for which JSON has no word, are the strings "NaN", "Infinity" and "-Infinity". A reader ignores fields
that it does not know, so a field with a default can be added within a version.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path

from ampatch import AmpError, AmpValueError
from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.rows import Curve, Ending, Environment, Run, Settings, Sweep
from ampatch.sweeps.show.page import write_page
from ampatch.tools.folder import is_locked, lock

JSON, PAGE, LOGS = "sweep.json", "sweep.html", "logs"
DEFAULT = "ampatch-sweep"
FORMAT = "ampatch sweep"
VERSION = 3
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
EXPECTED = f"expected a {JSON}, or a folder with one, that `ampatch sweep` wrote"


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
        """Writes both files; raises AmpError if one cannot be written."""
        if self.folder is None:
            return
        for name, make in ((JSON, to_json), (PAGE, write_page)):
            try:
                write(self.folder / name, make(sweep))
            except OSError as error:
                raise AmpError(f"'{self.folder / name}' cannot be written: {error.strerror}") from None
        self._saved = True

    def describe(self) -> list[str]:
        """Says in lines where everything is."""
        lines = [f"wrote {self.folder / JSON}, {PAGE}"] if self._saved else []
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
    return str(max(files, key=lambda path: path.stat().st_mtime_ns).parent)


def write(path: Path, text: str) -> None:
    """Writes a file in one go: whoever reads it meanwhile finds the whole of the old or of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)  # a script may have cleared its output
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ---- sweep.json ----


def to_json(sweep: Sweep) -> str:
    """Writes a sweep as JSON in ASCII, a line for each part of it."""
    parts = {"format": FORMAT, "version": VERSION, **to_plain(sweep)}
    lines = [f"{json.dumps(name)}: {json.dumps(part, allow_nan=False)}" for name, part in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str = JSON) -> Sweep:
    """Reads what `to_json` wrote, and sums its runs up; errors begin with `name`, best the path of the file.

    Raises AmpValueError for what is no sweep, or one of another version.
    """
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AmpValueError(f"{name}: not JSON ({error}): {EXPECTED}") from None
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        raise AmpValueError(f"{name}: JSON, but not of the format {FORMAT!r}: {EXPECTED}")
    if parts.get("version") != VERSION:
        raise AmpValueError(
            f"{name}: version {parts.get('version')!r}, and this ampatch reads version {VERSION}: make the "
            "sweep again, or read it with the ampatch that wrote it"
        )
    try:
        settings, environment = (
            kind(**select_fields(kind, parts[part]))
            for kind, part in ((Settings, "settings"), (Environment, "environment"))
        )
        return summarize(settings, environment, list(map(to_run, parts["records"])))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise AmpValueError(f"{name}: a part of it is missing or damaged ({error}): {EXPECTED}") from None


def read_sweep(name: str) -> Sweep:
    """Reads a sweep.json, or the one in a folder; raises AmpValueError if there is none."""
    path = Path(name) / JSON if Path(name).is_dir() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AmpValueError(f"{str(path)!r} cannot be read ({error}): {EXPECTED}") from None
    return from_json(text, repr(str(path)))


def to_run(values: Mapping[str, object]) -> Run:
    """Makes a run of what JSON has of it."""
    plain = select_fields(Run, values)
    for name in ("losses", "metrics"):
        plain[name] = {key: Curve(**curve) for key, curve in plain.get(name, {}).items()}
    return Run(**plain | {"outcome": Ending(plain.get("outcome", Ending.FINISHED))})


def select_fields(kind: type, values: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of the fields that a row has, as they were before they were plain."""
    names = {field.name for field in fields(kind)}
    return {name: from_plain(value) for name, value in values.items() if name in names}


def to_plain(value: object) -> object:
    """Turns rows into dicts, tuples into lists, and numbers that are not finite into their names.

    >>> to_plain((1, float("-inf"), {"loss": None}))
    [1, '-Infinity', {'loss': None}]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else NOT_FINITE[1 if value > 0 else 2]
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(value: object) -> object:
    """Turns lists into tuples, and the names of numbers that are not finite into these."""
    if isinstance(value, dict):
        return {name: from_plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(map(from_plain, value))
    return float(value) if value in NOT_FINITE else value
