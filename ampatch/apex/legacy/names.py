"""Gives modules the names back that they have lost, and tells once of each that a script uses."""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

import numpy as np
import torch

from ampatch.apex.changes import ProgramChanges, is_library, script_frame, wrap
from ampatch.apex.drop_in import find_elsewhere
from ampatch.apex.legacy.patterns import METHODS, is_gone
from ampatch.apex.legacy.rows import LINALG, NAMES, Old
from ampatch.levels.stack import asked

# The linear algebra that torch still has the names of, and that raises.
RAISING = ("torch.symeig", "torch.solve", "torch.matrix_rank", *(row.name for row in LINALG))

Change = Callable[[object], None]  # of a module or class


class Notices:
    """Warns of each thing once: the first rank does, and the processes that it forks do not."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str | None]] = set()
        self._process = os.getpid() if os.environ.get("RANK", "0") == "0" else None

    def warn(self, row: Old, place: str | None = None) -> None:
        """Logs a warning if the script, or a file, says this first; what libraries ask for is left out."""
        key = row.name, place
        if key in self._warned or self._process != os.getpid():
            return
        place = place or script_place()
        if place is not None:
            self._warned.add(key)
            asked.warning("--legacy fixes %s in %s; since %s: use %s", row.name, place, row.since, row.remedy)


def script_place() -> str | None:
    """Returns the line that called torch or us, None if it is one of another library."""
    frame = script_frame()
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    return f"{os.path.relpath(frame.f_code.co_filename)}, line {frame.f_lineno}"


def warn_there(function: Callable, *args: object) -> object:
    """Calls a function that warns of the line that called it, which is to be the script's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = function(*args)
    frame = script_frame()
    for each in caught if frame else ():
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(each.message, each.category, *place, registry)
    return value


# ---- Where names are put back ----


class Places(MetaPathFinder):
    """Modules and classes that are changed: at once, or as soon as they are imported."""

    finds_apex = True  # which those who look for the module itself pass over

    def __init__(self, changes: ProgramChanges) -> None:
        self._waiting: dict[str, list[Change]] = defaultdict(list)
        sys.meta_path.insert(0, self)
        changes.callback(sys.meta_path.remove, self)
        changes.callback(self._waiting.clear)

    def change(self, place: str, change: Change) -> None:
        """Changes what has this dotted name."""
        owner = find_owner(place)
        if owner is None:
            self._waiting[place].append(change)
        else:
            change(owner)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module that is to be changed, as others find it."""
        spec = find_elsewhere(name, path) if self._places_of(name) else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _places_of(self, name: str) -> list[str]:
        return [each for each in self._waiting if name in (each, each.rpartition(".")[0])]

    def _execute(self, exec_module: Callable, module: ModuleType) -> None:
        exec_module(module)
        for place in self._places_of(module.__name__):
            owner = find_owner(place)
            for change in () if owner is None else self._waiting.pop(place, ()):
                change(owner)


def find_owner(place: str) -> object:
    """Returns a module that is imported, or a class of one; None where there is none yet."""
    module, _, name = place.rpartition(".")
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return sys.modules.get(place) or (kind if isinstance(kind, type) else None)


def put_back_names(changes: ProgramChanges, places: Places, notices: Notices) -> None:
    """Puts the names back that are gone here, so that a use of them can be told of."""
    rows: dict[str, dict[str, Old]] = defaultdict(dict)
    for row in NAMES:
        place, _, name = row.name.rpartition(".")
        if row.new and not place:
            changes.add_module(name, OldModule(row, notices))
        elif row.new:
            rows[place][name] = row
    for place, named in rows.items():
        places.change(place, functools.partial(put_back, changes, notices, named))


def put_back(changes: ProgramChanges, notices: Notices, rows: Mapping[str, Old], owner: object) -> None:
    """Puts names back into a module or class."""
    gone = {name: row for name, row in rows.items() if row.name in RAISING or is_gone(row.name)}
    for row in gone.values():
        if row.is_module:
            changes.add_module(row.name, OldModule(row, notices))
    if isinstance(owner, ModuleType) and owner is not torch:
        changes.set_attribute(owner, "__getattr__", OldNames(owner, gone, notices))
        return
    # torch has a `__getattr__` that warns who calls it, and Dynamo asks it for all names.
    for name, row in gone.items():
        value = sys.modules.get(row.name) or wrap(pkgutil.resolve_name(row.new), warned, notices, row)
        changes.set_attribute(owner, name, value)
        for more in {torch: (torch.Tensor,), np.ndarray: (np.generic,)}.get(owner, ()):
            if more is np.generic or name in METHODS:
                changes.set_attribute(more, name, value)


class OldNames:
    """The `__getattr__` of a module that has old names again, beside what it had of its own."""

    def __init__(self, module: ModuleType, rows: Mapping[str, Old], notices: Notices) -> None:
        self._module = module
        self._rows = rows
        self._notices = notices
        self._own = vars(module).get("__getattr__")

    def __call__(self, name: str) -> object:
        if name in self._rows:
            row = self._rows[name]
            self._notices.warn(row)
            return sys.modules[row.name] if row.is_module else warn_there(pkgutil.resolve_name, row.new)
        if self._own is not None:
            return warn_there(self._own, name)
        text = f"module {self._module.__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self._module)


class OldModule(ModuleType):
    """A module under its old name."""

    def __init__(self, row: Old, notices: Notices) -> None:
        super().__init__(row.name)
        self._row = row
        self._notices = notices

    def __getattr__(self, name: str) -> object:
        """Returns what the module has; what Python itself asks modules for is not worth an import."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        self._notices.warn(self._row)
        return getattr(pkgutil.resolve_name(self._row.new.removesuffix(":")), name)


def warned(function: Callable, notices: Notices, row: Old, /, *args: object, **kwargs: object) -> object:
    """Calls a function, and tells that a script does."""
    notices.warn(row)
    return function(*args, **kwargs)
