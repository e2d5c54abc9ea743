"""Has functions of NumPy take what they took in earlier years."""

from __future__ import annotations

import builtins
from collections.abc import Callable

import numpy as np

from ampatch.apex.legacy.finding import ROWS
from ampatch.apex.legacy.mending.arguments import load_objects
from ampatch.apex.legacy.mending.names import Told
from ampatch.apex.legacy.pattern_rows import COPY, NUMPY_LOAD, RAGGED


def read_bytes(
    fromstring: Callable,
    told: Told,
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
    told.tell(ROWS["numpy.fromstring(bytes)"])
    return np.frombuffer(string, dtype, count).copy()


def make_array(
    make: Callable, told: Told, /, object: object, dtype: object = None, **kwargs: object
) -> np.ndarray:
    """Has NumPy make arrays of rows of several lengths, and copies where it is told to make none."""
    try:
        return make(object, dtype, **kwargs)
    except ValueError as error:
        row = next((row for row in (ROWS[RAGGED], ROWS[COPY]) if row.error in str(error)), None)
        if row is None or (dtype is not None and row is ROWS[RAGGED]):
            raise
    told.tell(row)
    if row is ROWS[COPY]:
        return make_array(make, told, object, dtype, **{**kwargs, "copy": None})
    return make(object, builtins.object, **kwargs)


class OldNpz(np.lib.npyio.NpzFile):
    """An archive of arrays that gives objects as well."""

    told: Told

    def __getitem__(self, key: str) -> np.ndarray:
        """Reads an array."""
        try:
            return super().__getitem__(key)
        except ValueError as error:
            if self.allow_pickle or ROWS[NUMPY_LOAD].error not in str(error):
                raise
        self.told.tell(ROWS[NUMPY_LOAD])
        self.allow_pickle = True
        return super().__getitem__(key)


def load_arrays(load: Callable, told: Told, /, *args: object, **kwargs: object) -> object:
    """Has `numpy.load` load objects as well, where a script says nothing of it."""
    if args[2:] or "allow_pickle" in kwargs:
        return load(*args, **kwargs)
    loaded = load_objects(ROWS[NUMPY_LOAD], "allow_pickle", True, load, told, *args, **kwargs)
    if type(loaded) is OldNpz.__base__:
        loaded.__class__, loaded.told = OldNpz, told
    return loaded
