"""The file sweep.json: everything about a sweep, as JSON that any program reads.

The file is one object: `format` and `version`, then the fields of `Sweep` by name. Numbers that are not
finite, for which JSON has no word, are the strings "NaN", "Infinity" and "-Infinity". A reader ignores fields
that it does not know, so a field with a default can be added within a version.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

from ampatch import AmpValueError
from ampatch.sweeps.records.record import Measured
from ampatch.sweeps.records.sweep import Sweep

FORMAT = "ampatch sweep"
VERSION = 1
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
EXPECTED = "expected the sweep.json that `ampatch sweep --out` writes"


def to_json(sweep: Sweep) -> str:
    """Writes a sweep as JSON in ASCII, a line for each part of it."""
    parts = {"format": FORMAT, "version": VERSION, **to_plain(sweep)}
    lines = [f"{json.dumps(name)}: {json.dumps(part, allow_nan=False)}" for name, part in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str = "sweep.json") -> Sweep:
    """Reads what `to_json` wrote; errors begin with `name`, which is best the path of the file.

    Raises AmpValueError for what is no sweep, for a newer version, and for fields missing or of a wrong type.
    """
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AmpValueError(f"{name}: not JSON ({error}): {EXPECTED}") from None
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        raise AmpValueError(f"{name}: JSON, but not of the format {FORMAT!r}: {EXPECTED}")
    version = parts.get("version")
    if type(version) is not int or version < 1:
        raise AmpValueError(f"{name}: version {version!r}, expected a whole number from 1 up: {EXPECTED}")
    if version > VERSION:
        raise AmpValueError(
            f"{name}: version {version}, and this ampatch reads versions up to {VERSION}: "
            "upgrade ampatch, or make the file with this one"
        )
    try:
        return read(Sweep, parts, "sweep")
    except AmpValueError as error:
        raise AmpValueError(f"{name}: {error}: {EXPECTED}") from None


def read_measured(parts: dict) -> Measured:
    """Makes a `Measured` of what `to_plain` made of one, after a way through JSON."""
    return read(Measured, parts, "measured")


def to_plain(value: object) -> object:
    """Turns dataclasses into dicts, tuples into lists, and numbers that are not finite into their names.

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


def read(kind: object, value: object, where: str) -> object:
    """Makes a value of the annotated type `kind` of what JSON gave.

    Raises AmpValueError for what has another type, with `where` it is.
    """
    if isinstance(kind, types.UnionType):  # X | None is the only one there is
        return None if value is None else read(get_args(kind)[0], value, where)
    try:
        return make(kind, value, where)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, AmpValueError):
            raise
        raise AmpValueError(f"{where} is {repr(value)[:40]} ({error})") from None


def make(kind: object, value: object, where: str) -> object:
    """Makes the value, and raises whatever Python raises where it cannot be made."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(read(item, each, f"{where}[{at}]") for at, each in enumerate(require(list, value)))
    if get_origin(kind) in (dict, Mapping):
        item = get_args(kind)[1]
        return {name: read(item, each, f"{where}[{name!r}]") for name, each in value.items()}
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        known = {name: each for name, each in require(dict, value).items() if name in kinds}
        return kind(**{name: read(kinds[name], each, f"{where}.{name}") for name, each in known.items()})
    if kind is float:
        is_name = isinstance(value, str) and value in NOT_FINITE
        return float(value if is_name or type(value) is float else require(int, value))
    if kind in (str, int, bool):
        return require(kind, value)
    return kind(value)  # of an enum


def require(kind: type, value: object) -> object:
    """Returns the value if its type is exactly `kind`: in JSON, `true` is no number."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}")
    return value
