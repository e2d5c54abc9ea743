"""The files of a sweep: sweep.json, which any program reads, and sweep.csv, a line for each run.

sweep.json is one object: `format` and `version`, then the fields of `Sweep` by name. Numbers that are not
finite, for which JSON has no word, are the strings "NaN", "Infinity" and "-Infinity". A reader ignores fields
that it does not know, so a field with a default can be added within a version.
"""

from __future__ import annotations

import csv
import io
import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from ampatch import AmpValueError
from ampatch.sweeps.rows import Run, Sweep

JSON = "sweep.json"
FORMAT = "ampatch sweep"
VERSION = 2
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
EXPECTED = f"expected a {JSON}, or a folder with one, that `ampatch sweep` wrote"


def to_json(sweep: Sweep) -> str:
    """Writes a sweep as JSON in ASCII, a line for each part of it."""
    parts = {"format": FORMAT, "version": VERSION, **to_plain(sweep)}
    lines = [f"{json.dumps(name)}: {json.dumps(part, allow_nan=False)}" for name, part in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str = JSON) -> Sweep:
    """Reads what `to_json` wrote; errors begin with `name`, which is best the path of the file.

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
        return from_plain(Sweep, parts)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise AmpValueError(f"{name}: a part of it is missing or damaged ({error}): {EXPECTED}") from None


def read_sweep(name: str) -> Sweep:
    """Reads a sweep.json, or the one in a folder; raises AmpValueError if there is none."""
    path = Path(name) / JSON if Path(name).is_dir() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AmpValueError(f"{str(path)!r} cannot be read ({error}): {EXPECTED}") from None
    return from_json(text, repr(str(path)))


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


def from_plain(kind: object, value: object) -> object:
    """Makes a value of an annotated type of what JSON gave; raises what Python does where it cannot."""
    if isinstance(kind, types.UnionType):  # X | None is the only one there is
        return None if value is None else from_plain(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        return tuple(from_plain(get_args(kind)[0], item) for item in value)
    if get_origin(kind) in (dict, Mapping):
        return {name: from_plain(get_args(kind)[1], item) for name, item in value.items()}
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: from_plain(kinds[name], it) for name, it in value.items() if name in kinds})
    if kind is float:
        is_number = type(value) in (int, float) or value in NOT_FINITE
        return float(value if is_number else require(float, value))
    return require(kind, value) if kind in (str, int, bool) else kind(value)  # of an enum


def require(kind: type, value: object) -> object:
    """Returns the value if its type is exactly `kind`: in JSON, `true` is no number."""
    if type(value) is not kind:
        raise TypeError(f"{repr(value)[:40]} where {kind.__name__} is expected")
    return value


# ---- sweep.csv ----

NO_CELLS = ("lines", "losses", "loss_scales", "metrics", "start", "began", "ended")
CELLS = tuple(field.name for field in fields(Run) if field.name not in NO_CELLS)


def to_csv(sweep: Sweep) -> str:
    """Writes one line a run: its fields but for curves, how many steps were skipped, the last metrics.

    A cell is empty where nothing was measured. Numbers are written so that they are read back exactly; those
    that are not finite are nan, inf and -inf.
    """
    metrics = list(dict.fromkeys(name for run in sweep.records for name in run.metrics))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*CELLS, *(f"metric:{name}" for name in metrics), "torch"])
    for run in sweep.records:
        cells = {name: getattr(run, name) for name in CELLS} | {"skipped": len(run.skipped)}
        writer.writerow([*cells.values(), *map(run.last, metrics), sweep.environment.torch])
    return file.getvalue()
