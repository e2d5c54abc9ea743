"""Has functions and classes of Python, torch, NumPy and others take the arguments that they took."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Set

import numpy as np

from ampatch.apex.legacy import pattern_rows as rows
from ampatch.apex.legacy.mending.names import Notices, script_place
from ampatch.apex.legacy.patterns import POSITIONAL, librosa_wants_names


def init_silently(init: Callable, notices: Notices, /, self: object, *args: object, **kwargs: object) -> None:
    """Has a scheduler take `verbose`, and be silent."""
    if "verbose" in kwargs:
        notices.warn(rows.VERBOSE)
        del kwargs["verbose"]
    init(self, *args, **kwargs)


def init_sampler(init: Callable, notices: Notices, /, self: object, data_source: object = None) -> None:
    """Has a sampler take what it is to draw from, with which it never did anything."""
    if data_source is not None:
        notices.warn(rows.SAMPLER)


def init_with_floats(
    init: Callable,
    notices: Notices,
    /,
    self: object,
    params: object,
    lr: object = 1e-3,
    betas: tuple = (0.9, 0.999),
    *args: object,
    **kwargs: object,
) -> None:
    """Has Adam and AdamW take a 0 among their betas."""
    if any(isinstance(each, int) for each in betas):
        notices.warn(rows.BETAS)
        betas = tuple(map(float, betas))
    init(self, params, lr, betas, *args, **kwargs)


def sample_any(
    sample: Callable, notices: Notices, /, self: object, population: object, *args: object, **kw: object
) -> list:
    """Has `random.sample` draw from sets, in the order that they have."""
    if isinstance(population, Set):
        notices.warn(rows.SAMPLE)
        population = tuple(population)
    return sample(self, population, *args, **kw)


def load_yaml(load: Callable, notices: Notices, /, stream: object, Loader: object = None) -> object:
    """Has `yaml.load` and `load_all` take the loader that was theirs."""
    if Loader is None:
        notices.warn(rows.YAML)
        Loader = sys.modules["yaml"].FullLoader
    return load(stream, Loader)


def take_positional(function: Callable, notices: Notices, /, *args: object, **kwargs: object) -> object:
    """Has a function of librosa take arguments without their names, if it does not."""
    count = POSITIONAL[function.__name__]
    if not args[count:] or not librosa_wants_names():
        return function(*args, **kwargs)
    notices.warn(rows.LIBROSA)
    names = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    named = zip((each.name for each in names), args[count:], strict=False)
    return function(*args[:count], **dict(named), **kwargs)


def give_hex_colors(by_key: Callable, notices: Notices, /, self: object) -> dict[str, list]:
    """Has a script get the colors in a cycle of matplotlib as texts, such as "#1f77b4"."""
    values = by_key(self)
    colors = values.get("color", [])
    if script_place() is not None and any(isinstance(each, tuple) for each in colors):
        notices.warn(rows.COLORS)
        to_hex = sys.modules["matplotlib.colors"].to_hex
        values["color"] = [to_hex(each) if isinstance(each, tuple) else each for each in colors]
    return values


# ---- NumPy ----


def read_bytes(
    fromstring: Callable,
    notices: Notices,
    /,
    string: object,
    dtype: object = float,
    count: int = -1,
    *,
    sep: str = "",
    **like: object,
) -> object:
    """Has `numpy.fromstring` read bytes, too."""
    if sep:
        return fromstring(string, dtype, count, sep=sep, **like)
    notices.warn(rows.FROM_STRING)
    return np.frombuffer(string, dtype, count).copy()


def make_array(
    make: Callable, notices: Notices, /, object: object, dtype: object = None, **kwargs: object
) -> np.ndarray:
    """Has NumPy make arrays of rows of several lengths, and copies where it is told to make none."""
    try:
        return make(object, dtype, **kwargs)
    except ValueError as error:
        row = next((row for row in (rows.RAGGED, rows.COPY) if row.error in str(error)), None)
        if row is None or (dtype is not None and row is rows.RAGGED):
            raise
    notices.warn(row)
    if row is rows.COPY:
        return make_array(make, notices, object, dtype, **{**kwargs, "copy": None})
    return make(object, builtins.object, **kwargs)
