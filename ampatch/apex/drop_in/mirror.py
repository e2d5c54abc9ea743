"""Our modules under the names that apex gave them.

A module has two names in `sys.modules`, its own and apex's. All names are given at once: the import
system neither loads nor binds again what is there already, so that `apex.amp` keeps its object
`_amp_state` instead of the submodule of that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from opcode import opmap
from pathlib import Path
from types import FrameType, ModuleType

from ampatch import __version__
from ampatch.apex.changes import Changes
from ampatch.apex.drop_in.missing import EXTENSION_NAMES, explain

PARTS = ("amp", "contrib", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
EXTENSIONS = ("amp_C", "apex_C")
PACKAGES = ("apex", *(f"apex.{part}" for part in PARTS), *EXTENSIONS)  # what a real one may lack
ROOTS = frozenset({"apex", *EXTENSIONS, *EXTENSION_NAMES})
OURS = "ampatch.apex."

# 0.1 is what apex's own setup.py said, to the end.
VERSION = f"0.1+ampatch.{__version__}"


def own_name(name: str) -> str:
    """Returns what a module of apex is called here.

    >>> own_name("apex.parallel.LARC"), own_name("amp_C")
    ('ampatch.apex.parallel.LARC', 'ampatch.apex.amp_C')
    """
    return OURS + name.removeprefix("apex.")


def apex_name(name: str) -> str:
    """Returns what a module of ours is called in apex.

    >>> apex_name("ampatch.apex.parallel.LARC"), apex_name("ampatch.apex.amp_C"), apex_name("apex")
    ('apex.parallel.LARC', 'amp_C', 'apex')
    """
    if not name.startswith(OURS):
        return name
    rest = name.removeprefix(OURS)
    return rest if rest in EXTENSIONS else f"apex.{rest}"


def is_mirrored(name: str) -> bool:
    """Says whether a module is one of those that we may have: `apex`, a part of it or an extension."""
    first, *rest = name.split(".")
    return name in EXTENSIONS or (first == "apex" and (not rest or rest[0] in PARTS))


class Mirror(ModuleType):
    """A module that stands for one of apex's: a name that it lacks is explained."""

    def __getattr__(self, name: str) -> object:
        module = apex_name(self.__name__)
        text = explain(f"{module}.{name}")
        if text is not None and is_import_from(sys._getframe(1)):
            raise ImportError(text, name=module)
        text = text or f"module {module!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)


def is_import_from(frame: FrameType) -> bool:
    """Says whether a frame is executing `from module import name`, which would drop an AttributeError."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


class MirrorLoader(Loader):
    """Loads `apex` as a new module, and a module of apex's as the one that stands for it."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Makes the module `apex`; for others a plain one, which `exec_module` replaces."""
        return Mirror(spec.name) if spec.name == "apex" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module `apex`, or puts the module that stands for another in its place.

        The import system takes up what is in `sys.modules` by now. Had `create_module` returned
        that module, it would have been given a second `__spec__`.
        """
        if module.__name__ == "apex":
            fill_apex(module, self._changes)
        else:
            add_modules(module.__name__, self._changes)


def mirror_spec(name: str, changes: Changes) -> ModuleSpec | None:
    """Describes one of our modules under its name in apex; None if we have none of that name.

    `apex` itself is a package without a folder: its parts all get their names when it is imported.
    """
    loader = MirrorLoader(changes)
    if name == "apex":
        return ModuleSpec(name, loader, is_package=True)
    own = importlib.util.find_spec(own_name(name)) if is_mirrored(name) else None
    if own is None:
        return None
    is_package = own.submodule_search_locations is not None
    return ModuleSpec(name, loader, origin=own.origin, is_package=is_package)


def fill_apex(apex: ModuleType, changes: Changes) -> None:
    """Gives our module `apex` its parts."""
    apex.__doc__ = f"What scripts written for apex need, by ampatch {__version__}."
    apex.__version__ = VERSION
    apex.__file__ = str(Path(__file__).parents[1] / "__init__.py")
    with Changes() as done:
        for part in PARTS:
            setattr(apex, part, add_modules(f"apex.{part}", done))
        done.add_module("apex", apex)
        # All of them or, if one fails, none.
        changes.push(done.pop_all())


def add_modules(name: str, changes: Changes) -> ModuleType:
    """Gives a module of ours, and all those below it, their names in apex; returns the module."""
    for each, module in tree(name):
        changes.add_module(each, module)
        changes.set_class(module, Mirror)
    return importlib.import_module(own_name(name))


def tree(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Yields a module of ours and those below it, each with its name in apex."""
    module = importlib.import_module(own_name(name))
    yield name, module
    for below in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if below.name != "__main__":
            yield from tree(f"{name}.{below.name}")
