"""Has torch.load and numpy.load read what they read in earlier years, as far as it is data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO

import numpy as np

from ampatch import AmpValueError
from ampatch.apex.legacy import pickles, rows
from ampatch.apex.legacy.names import Notices
from ampatch.apex.legacy.pickles import RefusedError
from ampatch.apex.legacy.rows import Old
from ampatch.levels.stack import asked


class UntrustedFileError(AmpValueError, pickle.UnpicklingError):
    """A file holds more than data."""


class Loads:
    """Loads what a script says nothing of: data as it is, and with `is_unsafe` whatever else a file holds."""

    def __init__(self, notices: Notices, is_unsafe: bool) -> None:
        self._notices = notices
        self._is_unsafe = is_unsafe

    def torch_load(self, load: Callable, /, *args: object, **kwargs: object) -> object:
        """Does what `torch.load` did up to torch 2.5, but for code in the file."""
        file = args[0] if args else kwargs.get("f")
        place = file.tell() if hasattr(file, "tell") else 0
        try:
            return load(*args, **kwargs)
        except pickle.UnpicklingError as error:
            is_said = kwargs.get("weights_only") is not None or is_forced()
            if is_said or kwargs.get("pickle_module") is not None or rows.LOAD.error not in str(error):
                raise

        def load_again(**options: object) -> object:
            if hasattr(file, "seek"):
                file.seek(place)
            return load(*args, **{**kwargs, "weights_only": False, **options})

        return self._load(rows.LOAD, file, lambda: load_again(pickle_module=pickles), load_again)

    def numpy_load(self, load: Callable, /, *args: object, **kwargs: object) -> object:
        """Does what `numpy.load` did up to NumPy 1.16.2, but for code in the file."""
        if args[2:] or "allow_pickle" in kwargs:
            return load(*args, **kwargs)
        file = args[0] if args else kwargs.get("file")
        place = file.tell() if hasattr(file, "tell") else 0
        try:
            loaded = load(*args, **kwargs)
        except ValueError as error:
            if rows.NUMPY_LOAD.error not in str(error):
                raise
        else:
            if type(loaded) is OldNpz.__base__:
                loaded.__class__, loaded.loads = OldNpz, self
            return loaded

        def load_data() -> object:
            with ExitStack() as stack:
                opened = file if hasattr(file, "read") else stack.enter_context(open(file, "rb"))
                opened.seek(place)
                return read_objects(opened, encoding=kwargs.get("encoding", "ASCII"))

        def load_all() -> object:
            if hasattr(file, "seek"):
                file.seek(place)
            return load(*args, **kwargs, allow_pickle=True)

        return self._load(rows.NUMPY_LOAD, file, load_data, load_all)

    def load_from_archive(self, archive: np.lib.npyio.NpzFile, key: str) -> np.ndarray:
        """Reads an array of objects in an archive."""

        def load_data() -> object:
            with archive.zip.open(key if key in archive.zip.namelist() else f"{key}.npy") as file:
                return read_objects(file, **archive.pickle_kwargs)

        def load_all() -> np.ndarray:
            archive.allow_pickle = True
            try:
                return super(OldNpz, archive).__getitem__(key)
            finally:
                archive.allow_pickle = False

        return self._load(rows.NUMPY_LOAD, archive.zip.filename or key, load_data, load_all)

    def _load(self, row: Old, file: object, load_data: Callable, load_all: Callable) -> object:
        function = row.name.partition("(")[0]
        name = repr(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else f"<{type(file).__name__}>"
        try:
            loaded = load_data()
        except RefusedError as error:
            wanted = error
        except Exception as error:
            wanted = RefusedError([f"what raises {type(error).__name__} ({error})"])
        else:
            self._notices.warn(row)
            return loaded
        if not self._is_unsafe:
            raise UntrustedFileError(
                f"{function} of {name}: the file wants {wanted}, which may run any code; expected data. "
                f"If you trust whoever wrote it, run the script with --legacy --unsafe-load"
            )
        asked.warning("--unsafe-load loads %s, which wants %s, and may run any code", name, wanted)
        return load_all()


def is_forced() -> bool:
    return os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")


def read_objects(file: IO[bytes], **options: object) -> object:
    """Reads an array of objects, or whatever else was pickled where an array was expected."""
    prefix = file.read(len(np.lib.format.MAGIC_PREFIX))
    file.seek(-len(prefix), os.SEEK_CUR)
    if prefix == np.lib.format.MAGIC_PREFIX:
        version = np.lib.format.read_magic(file)
        skip = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in skip:
            raise RefusedError([f"version {version} of the format .npy"])
        skip[version](file)
    return pickles.load(file, **options)


class OldNpz(np.lib.npyio.NpzFile):
    """An archive of arrays that gives objects as well."""

    loads: Loads

    def __getitem__(self, key: str) -> np.ndarray:
        try:
            return super().__getitem__(key)
        except ValueError as error:
            if self.allow_pickle or rows.NUMPY_LOAD.error not in str(error):
                raise
        return self.loads.load_from_archive(self, key)
