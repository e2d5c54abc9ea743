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
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

from ampatch import AmpValueError
from ampatch.sweeps.records.record import Measured, Word
from ampatch.sweeps.records.sweep import Sweep

FORMAT = "ampatch sweep"
VERSION = 1
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
WORDS = {str: "a text", bool: "true or false", int: "a whole number", type(None): "null"}


def to_json(sweep: Sweep) -> str:
    """Writes a sweep as JSON in ASCII, a line for each part of it."""
    parts = {"format": FORMAT, "version": VERSION, **to_plain(sweep)}
    lines = [f"{json.dumps(name)}: {json.dumps(part, allow_nan=False)}" for name, part in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str = "sweep.json") -> Sweep:
    """Reads what `to_json` wrote; errors begin with `name`, which is best the path of the file.

    Raises AmpValueError for what is no sweep, for a newer version, and for fields missing or of a wrong type.
    """
    expected = "expected the sweep.json that `ampatch sweep --out` writes"
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AmpValueError(f"{name}: not JSON ({error}): {expected}") from None
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        raise AmpValueError(f"{name}: JSON, but not of the format {FORMAT!r}: {expected}")
    version = parts.get("version")
    if type(version) is not int or version < 1:
        raise AmpValueError(f"{name}: version {version!r}, expected a whole number from 1 up: {expected}")
    if version > VERSION:
        raise AmpValueError(
            f"{name}: version {version}, and this ampatch reads versions up to {VERSION}: "
            "upgrade ampatch, or make the file with this one"
        )
    try:
        return read_object(Sweep, parts, "")
    except AmpValueError as error:
        raise AmpValueError(f"{name}: {error}: write it anew with `ampatch sweep --out`") from None


def read_measured(parts: dict) -> Measured:
    """Makes a `Measured` of what `dataclasses.asdict` made of one, after a way through JSON."""
    return read_object(Measured, parts, "measured")


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
    """Makes a value of the annotated type `kind` of what JSON gave; `where` is said in errors."""
    if isinstance(kind, types.UnionType):  # X | None is the only one there is
        return None if value is None else read(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        items = require(list, value, where, "a list")
        return tuple(read(item, each, f"{where}[{index}]") for index, each in enumerate(items))
    if get_origin(kind) in (dict, Mapping):
        item = get_args(kind)[1]
        items = require(dict, value, where, "an object")
        return {name: read(item, each, f"{where}[{name!r}]") for name, each in items.items()}
    if is_dataclass(kind):
        return read_object(kind, value, where)
    if issubclass(kind, Word):
        return read_word(kind, value, where)
    return read_number(value, where) if kind is float else require(kind, value, where, WORDS[kind])


def read_object(kind: type, value: object, where: str) -> object:
    """Makes a dataclass; a field that the JSON lacks takes its default if it has one."""
    parts = require(dict, value, where or "the file", "an object")
    kinds = get_type_hints(kind)
    required = [it.name for it in fields(kind) if it.default is MISSING and it.default_factory is MISSING]
    missing = [name for name in required if name not in parts]
    if missing:
        raise AmpValueError(f"{where or 'the file'} has no {', '.join(map(repr, missing))}")
    known = [it.name for it in fields(kind) if it.name in parts]
    return kind(**{name: read(kinds[name], parts[name], f"{where}.{name}".strip(".")) for name in known})


def read_word(kind: type[Word], value: object, where: str) -> Word:
    """Reads one of the values of an enum."""
    if value not in list(kind):
        expected = ", ".join(repr(each.value) for each in kind)
        raise AmpValueError(f"{where} is {in_brief(value)}, expected one of {expected}")
    return kind(value)


def read_number(value: object, where: str) -> float:
    """Reads a float: a number, or the name of one that is not finite."""
    if type(value) is float or (isinstance(value, str) and value in NOT_FINITE):
        return float(value)
    try:
        return float(require(int, value, where, "a number"))
    except OverflowError:
        raise AmpValueError(f"{where} is {in_brief(value)}, expected a number that fits a float") from None


def require(kind: type, value: object, where: str, expected: str) -> object:
    """Returns the value if its type is exactly `kind`: in JSON, `true` is no number."""
    if type(value) is not kind:
        raise AmpValueError(f"{where} is {in_brief(value)}, expected {expected}")
    return value


def in_brief(value: object) -> str:
    """Writes what was found, at a length that leaves an error readable.

    >>> in_brief([0] * 100)
    '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0...'
    """
    text = repr(value)
    return text if len(text) <= 40 else text[:38] + "..."
