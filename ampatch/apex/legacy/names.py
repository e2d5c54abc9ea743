"""Gives modules the names back that they have lost, and tells once of each that a script uses."""

from __future__ import annotations

import importlib.util
import logging
import os
import pkgutil
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch

import ampatch
from ampatch.apex.changes import Changes, wrap
from ampatch.apex.legacy.finding import METHODS, is_gone
from ampatch.apex.legacy.table import NAMES, Old

LOG = logging.getLogger("ampatch")
PASSED = (os.path.dirname(torch.__file__), os.path.dirname(ampatch.__file__), "<frozen importlib")
LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# The linear algebra that torch still has the names of, and that raises.
RAISING = ("torch.symeig", "torch.solve", "torch.matrix_rank")


class Told:
    """What was told of already, by the first rank alone and not again in the processes that it forks."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str | None]] = set()
        self._process = os.getpid() if os.environ.get("RANK", "0") == "0" else None

    def tell(self, row: Old, place: str | None = None) -> None:
        """Logs a warning if the script, or a file, says this first; what libraries ask for is left out."""
        key = row.name, place
        if key in self._told or self._process != os.getpid():
            return
        place = place or script_place()
        if place is not None:
            self._told.add(key)
            LOG.warning("--legacy mends %s in %s; since %s: use %s", row.name, place, row.since, row.remedy)


def script_place() -> str | None:
    """Returns the line that called torch or us, None if it is one of another library."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(PASSED):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(LIBRARIES):
        return None
    return f"{os.path.relpath(frame.f_code.co_filename)}, line {frame.f_lineno}"


class OldNames:
    """The `__getattr__` of a module that has old names again, beside what it had of its own."""

    def __init__(self, module: ModuleType, rows: Mapping[str, Old], told: Told) -> None:
        self._module = module
        self._rows = rows
        self._told = told
        self._own = vars(module).get("__getattr__")

    def __call__(self, name: str) -> object:
        """Returns what an old name stands for."""
        if name in self._rows:
            self._told.tell(self._rows[name])
            return pkgutil.resolve_name(self._rows[name].new)
        if self._own is not None:
            return self._own(name)
        text = f"module {self._module.__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self._module)


def put_back_names(changes: Changes, told: Told) -> None:
    """Puts the names back that are gone here, so that a use of them can be told of."""
    places: dict[str, dict[str, Old]] = defaultdict(dict)
    for row in names_to_mend():
        value = pkgutil.resolve_name(row.new)
        place, _, name = row.name.rpartition(".")
        if isinstance(value, ModuleType):
            value = OldModule(row, value, told)
            changes.add_module(row.name, value)
        if place == "torch":  # whose own `__getattr__` warns who calls it, and Dynamo asks it for all names
            value = value if isinstance(value, ModuleType) else wrap(value, tell, told, row)
            changes.set_attribute(torch, name, value)
            if name in METHODS:
                changes.set_attribute(torch.Tensor, name, value)
        else:
            places[place][name] = row
    for place, rows in places.items():
        module = pkgutil.resolve_name(place)
        changes.set_attribute(module, "__getattr__", OldNames(module, rows, told))


def names_to_mend() -> Iterator[Old]:
    """Yields the names that are gone here and can be put back."""
    for row in NAMES:
        root = row.name.partition(".")[0]
        if row.new and importlib.util.find_spec(root) and (row.name in RAISING or is_gone(row.name)):
            yield row


class OldModule(ModuleType):
    """A module under its old name."""

    def __init__(self, row: Old, module: ModuleType, told: Told) -> None:
        super().__init__(row.name)
        self._row = row
        self._module = module
        self._told = told

    def __getattr__(self, name: str) -> object:
        """Returns what the module has."""
        self._told.tell(self._row)
        return getattr(self._module, name)


def tell(function: Callable, told: Told, row: Old, /, *args: object, **kwargs: object) -> object:
    """Calls a function, and tells that a script does."""
    told.tell(row)
    return function(*args, **kwargs)
