"""What Python asks for `apex`: an entry of `sys.meta_path`, and all that was changed through it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from multiprocessing import spawn
from pathlib import Path
from types import FrameType, ModuleType

import ampatch as amp
from ampatch.apex.changes import Changes
from ampatch.apex.drop_in.children import Preparation
from ampatch.apex.drop_in.mirror import PACKAGES, ROOTS, VERSION, mirror_spec
from ampatch.apex.drop_in.missing import explain
from ampatch.apex.drop_in.real import WatchingLoader, fill_loaded, find_elsewhere, find_fault
from ampatch.levels.stack import asked

BOOTSTRAP = "<frozen importlib._bootstrap>"


class ApexFinder(MetaPathFinder):
    """Finds apex, real or ours; remembers what an installation changed, which `uninstall` undoes."""

    finds_apex = True

    def __init__(self) -> None:
        self._changes = Changes()
        self._overrides: dict[str, object] = {}

    @classmethod
    def installed(cls) -> ApexFinder | None:
        return next((finder for finder in sys.meta_path if isinstance(finder, cls)), None)

    @classmethod
    def install(cls) -> ApexFinder:
        """Puts a new finder on `sys.meta_path`, fills in an apex that is imported already, and returns it."""
        finder = cls()
        changes = finder._changes
        changes.callback(sys.meta_path.remove, finder)
        sys.meta_path.insert(0, finder)
        preparation = Preparation(spawn.get_preparation_data, finder._overrides)
        changes.set_attribute(spawn, "get_preparation_data", preparation)
        fill_loaded(changes)
        return finder

    def override(self, overrides: dict[str, object]) -> None:
        """Gives `initialize` these arguments until `uninstall`, here and in children."""
        self._changes.enter_context(amp.override(**overrides))
        self._overrides.update(overrides)

    def uninstall(self) -> None:
        self._changes.close()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a real module first, and watches it; ours if there is none.

        Raises ImportError, with what to use instead, if neither is there, apex had the module, and
        this is an import.
        """
        if name.partition(".")[0] not in ROOTS:
            return None
        real = find_elsewhere(name, path)
        if real is not None and name == "apex":
            real = self._check(real)
        if real is not None:
            return self._watch(real)
        own = mirror_spec(name, self._changes)
        text = explain(name) if own is None and is_import() else None
        if text is not None:
            raise ModuleNotFoundError(text, name=name)
        return own

    def _check(self, real: ModuleSpec) -> ModuleSpec | None:
        fault = find_fault(real)
        if fault is None:
            return real
        if is_import():
            asked.warning("%s; ampatch's apex takes its place", fault)
        return None

    def _watch(self, real: ModuleSpec) -> ModuleSpec:
        if real.name in PACKAGES and hasattr(real.loader, "exec_module"):
            real.loader = WatchingLoader(real.loader, self._changes)
        return real

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yields a distribution called apex where none is installed: programs ask for its version."""
        if context.name in (None, "apex") and not any(distributions_elsewhere()):
            yield ApexDistribution()


def is_import() -> bool:
    """Says whether a finder is asked for an import, and not by `importlib.util.find_spec`.

    An import must raise for what is not there, and `find_spec` must return None. Nothing tells a finder
    which of the two asks, but the functions of the import system that call it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_find_and_load_unlocked":
        is_inside = frame.f_code.co_filename in (__file__, BOOTSTRAP)
        frame = frame.f_back if is_inside else None
    return frame is not None


def distributions_elsewhere() -> Iterator[Distribution]:
    """Yields the distributions called apex that are installed."""
    context = DistributionFinder.Context(name="apex")
    for finder in sys.meta_path:
        if hasattr(finder, "find_distributions") and not isinstance(finder, ApexFinder):
            yield from finder.find_distributions(context)


class ApexDistribution(Distribution):
    """Tells `importlib.metadata` that there is an apex, and its version."""

    def read_text(self, filename: str) -> str | None:
        """Returns what would stand in a file of the distribution; None for most."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {VERSION}\n",
            "top_level.txt": "apex\namp_C\napex_C\n",
        }.get(filename)

    def locate_file(self, path: str) -> Path:
        """Returns where a file of the distribution would be: nowhere of its own."""
        return Path(__file__).parent / path
