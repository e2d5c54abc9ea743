"""A real apex: what it has stays its own, and what it lacks is filled in."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from ampatch.apex.changes import Changes
from ampatch.apex.drop_in.mirror import OURS, PACKAGES, PARTS, add_modules, mirror_spec, own_name, tree
from ampatch.levels.stack import asked

# The packages that NVIDIA's apex has or had at the top.
KNOWN_PARTS = frozenset({*PARTS, "fused_dense", "mlp", "pyprof", "reparameterization", "transformer"})
# These hold state that their parts share: a name of ours in a real one would act on another state.
WHOLE = ("apex.amp",)


def is_nvidias(spec: ModuleSpec) -> bool:
    """Says whether a package called apex has at least one part of NVIDIA's."""
    folders = [folder for folder in spec.submodule_search_locations or () if os.path.isdir(folder)]
    entries = {entry.partition(".")[0] for folder in folders for entry in os.listdir(folder)}
    return bool(entries & KNOWN_PARTS)


def is_installed(spec: ModuleSpec) -> bool:
    """Says whether a package lies where pip puts packages, and so is no part of the user's program."""
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
    folders = {part for place in places for part in place.split(os.sep)}
    return bool(folders & {"site-packages", "dist-packages"})


def find_fault(spec: ModuleSpec) -> str | None:
    """Says why a package called apex is none that a script could mean; None for a good one."""
    folders = spec.submodule_search_locations
    if folders is None or is_nvidias(spec):
        return None
    if spec.origin is None:
        return f"the folder {next(iter(folders), 'apex')!r} is not a package: it has no __init__.py"
    if is_installed(spec):
        return f"{spec.origin!r} is another project of that name on PyPI, not NVIDIA's apex"
    return None


def is_real_installed() -> bool:
    """Says whether there is an apex of NVIDIA's to import."""
    spec = find_elsewhere("apex", None)
    return spec is not None and is_nvidias(spec)


class WatchingLoader(Loader):
    """Loads a module of a real apex, and then fills in what it lacks.

    One that cannot be loaded, since it was not compiled or is too old for this Python or torch, is
    replaced by ours.
    """

    def __init__(self, real: Loader, changes: Changes) -> None:
        self._real = real
        self._changes = changes

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module as its own loader does."""
        spec = module.__spec__
        spec.loader = module.__loader__ = self._real
        before = set(sys.modules)
        try:
            self._real.exec_module(module)
        except Exception as error:
            if not may_replace(spec):
                raise
            asked.warning("%s cannot be imported: %r; ampatch's takes its place", spec.name, error)
            replace(spec.name, before, self._changes)
        else:
            fill(spec.name, module, self._changes)


def may_replace(spec: ModuleSpec) -> bool:
    """Says whether a module that failed is apex's, and no package of the user's own called apex."""
    return spec.name != "apex" or is_nvidias(spec) or is_installed(spec)


def replace(name: str, before: set[str], changes: Changes) -> None:
    """Puts ours in the place of a module that failed, and forgets what it had loaded by then."""
    for each in [each for each in sys.modules if each.startswith(f"{name}.") and each not in before]:
        del sys.modules[each]
    spec = mirror_spec(name, changes)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def fill(name: str, module: ModuleType, changes: Changes) -> None:
    """Adds to a module of a real apex what it lacks: parts to `apex`, and names to its parts."""
    if name == "apex":
        for part in PARTS:
            if part not in vars(module) and lacks(module, f"apex.{part}"):
                changes.set_attribute(module, part, add_modules(f"apex.{part}", changes))
    elif name not in WHOLE:
        submodules = [(each, own) for each, own in tree(name) if each != name and lacks(module, each)]
        for each, own in submodules:
            changes.add_module(each, own)
        offered = [
            *public_names(own_name(name)),
            *((each.rpartition(".")[2], own) for each, own in submodules),
        ]
        for each, value in offered:
            if each not in vars(module):
                changes.set_attribute(module, each, value)


def lacks(module: ModuleType, name: str) -> bool:
    """Says whether a package has no submodule of this whole name: not loaded, and not on its path."""
    return name not in sys.modules and find_elsewhere(name, getattr(module, "__path__", [])) is None


def fill_loaded(changes: Changes) -> None:
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is not None and not module.__name__.startswith(OURS):
            fill(name, module, changes)


def public_names(name: str) -> Iterator[tuple[str, object]]:
    """Yields what a module of ours offers: its `__all__`, or what is made here and has no underscore."""
    module = importlib.import_module(name)
    for each in getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")]):
        value = getattr(module, each)
        is_made_here = getattr(value, "__module__", OURS).startswith("ampatch.")
        if not isinstance(value, ModuleType) and (is_made_here or hasattr(module, "__all__")):
            yield each, value


def find_elsewhere(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Asks the finders of `sys.meta_path` but ours for a module."""
    for finder in sys.meta_path:
        if getattr(finder, "finds_apex", False) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
