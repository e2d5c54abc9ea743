"""Makes `import apex` work: gives our modules its names, and fills in what a real one lacks.

A module has two names in `sys.modules`, its own and apex's. All names are given at once: the import
system neither loads nor binds again what is there already, so that `apex.amp` keeps its object
`_amp_state` instead of the submodule of that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from multiprocessing import spawn
from opcode import opmap
from pathlib import Path
from types import FrameType, ModuleType

import ampatch
from ampatch import __version__
from ampatch.apex.changes import ProgramChanges
from ampatch.apex.missing import EXTENSION_NAMES, explain
from ampatch.levels.stack import asked

PARTS = ("amp", "contrib", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
EXTENSIONS = ("amp_C", "apex_C")
PACKAGES = ("apex", *(f"apex.{part}" for part in PARTS), *EXTENSIONS)  # what a real one may lack
ROOTS = frozenset({"apex", *EXTENSIONS, *EXTENSION_NAMES})
OURS = "ampatch.apex."

# Modules of apex whose names are in another of ours.
ELSEWHERE = {
    "apex.amp._process_optimizer": "amp._amp_state",
    "apex.amp.amp": "amp.frontend",
    "apex.amp.opt": "amp.handle",
    "apex.multi_tensor_apply.multi_tensor_apply": "multi_tensor_apply",
    "apex.optimizers.fused_adagrad": "optimizers.fused",
    "apex.optimizers.fused_adam": "optimizers.fused",
    "apex.optimizers.fused_lamb": "optimizers.fused",
    "apex.optimizers.fused_novograd": "optimizers.fused",
    "apex.optimizers.fused_sgd": "optimizers.fused",
    "apex.parallel.optimized_sync_batchnorm": "parallel.sync_batchnorm",
}

# 0.1 is what apex's own setup.py said, to the end.
VERSION = f"0.1+ampatch.{__version__}"


def own_name(name: str) -> str:
    """Returns what a module of apex is called here.

    >>> own_name("apex.parallel.LARC"), own_name("amp_C")
    ('ampatch.apex.parallel.LARC', 'ampatch.apex.amp_C')
    """
    return OURS + ELSEWHERE.get(name, name.removeprefix("apex."))


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
    """Whether a module is one of those that we may have: `apex`, a part of it or an extension."""
    first, *rest = name.split(".")
    return name in EXTENSIONS or (first == "apex" and (not rest or rest[0] in PARTS))


class Mirror(ModuleType):
    """A module that stands for one of apex's: a name that it lacks is explained."""

    def __getattr__(self, name: str) -> object:
        module = apex_name(self.__name__)
        if f"{module}.{name}" in ELSEWHERE:
            return importlib.import_module(own_name(f"{module}.{name}"))
        text = explain(f"{module}.{name}")
        if text is not None and is_import_from(sys._getframe(1)):
            raise ImportError(text, name=module)
        text = text or f"module {module!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)


def is_import_from(frame: FrameType) -> bool:
    """Whether a frame is executing `from module import name`, which would drop an AttributeError."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


class MirrorLoader(Loader):
    """Loads `apex` as a new module, and a module of apex's as the one that stands for it."""

    def __init__(self, changes: ProgramChanges) -> None:
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


def mirror_spec(name: str, changes: ProgramChanges) -> ModuleSpec | None:
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


def fill_apex(apex: ModuleType, changes: ProgramChanges) -> None:
    """Gives our module `apex` its parts."""
    apex.__doc__ = f"What scripts written for apex need, by ampatch {__version__}."
    apex.__version__ = VERSION
    apex.__file__ = str(Path(__file__).parent / "__init__.py")
    with ProgramChanges() as done:
        for part in PARTS:
            setattr(apex, part, add_modules(f"apex.{part}", done))
        done.add_module("apex", apex)
        # All of them or, if one fails, none.
        changes.push(done.pop_all())


def add_modules(name: str, changes: ProgramChanges) -> ModuleType:
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
    for each in ELSEWHERE:
        if each.rpartition(".")[0] == name:
            yield each, importlib.import_module(own_name(each))


# ---- A real apex: what it has stays its own, and what it lacks is filled in ----

# The packages that NVIDIA's apex has or had at the top.
KNOWN_PARTS = frozenset({*PARTS, "fused_dense", "mlp", "pyprof", "reparameterization", "transformer"})
# These hold state that their parts share: a name of ours in a real one would act on another state.
WHOLE = ("apex.amp",)


def is_nvidias(spec: ModuleSpec) -> bool:
    """Whether a package called apex has at least one part of NVIDIA's."""
    folders = [folder for folder in spec.submodule_search_locations or () if os.path.isdir(folder)]
    entries = {entry.partition(".")[0] for folder in folders for entry in os.listdir(folder)}
    return bool(entries & KNOWN_PARTS)


def is_installed(spec: ModuleSpec) -> bool:
    """Whether a package lies where pip puts packages, and so is no part of the user's program."""
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
    """Whether there is an apex of NVIDIA's to import."""
    spec = find_elsewhere("apex", None)
    return spec is not None and is_nvidias(spec)


class WatchingLoader(Loader):
    """Loads a module of a real apex, and then fills in what it lacks.

    One that cannot be loaded, since it was not compiled or is too old for this Python or torch, is
    replaced by ours.
    """

    def __init__(self, real: Loader, changes: ProgramChanges) -> None:
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
    """Whether a module that failed is apex's, and no package of the user's own called apex."""
    return spec.name != "apex" or is_nvidias(spec) or is_installed(spec)


def replace(name: str, before: set[str], changes: ProgramChanges) -> None:
    """Puts ours in the place of a module that failed, and forgets what it had loaded by then."""
    for each in [each for each in sys.modules if each.startswith(f"{name}.") and each not in before]:
        del sys.modules[each]
    spec = mirror_spec(name, changes)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def fill(name: str, module: ModuleType, changes: ProgramChanges) -> None:
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
    """Whether a package has no submodule of this whole name: not loaded, and not on its path."""
    return name not in sys.modules and find_elsewhere(name, getattr(module, "__path__", [])) is None


def fill_loaded(changes: ProgramChanges) -> None:
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


# ---- Processes that multiprocessing starts anew: prepared before they import the script ----

# The folder that ampatch was imported from: a child knows its parent's sys.path only later.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(ampatch.__file__)))


@dataclass(frozen=True, slots=True)
class Preparation:
    """Takes the place of `multiprocessing.spawn.get_preparation_data`, and adds what a child calls.

    The child unpickles the data, and only then prepares itself with them: it imports the script.
    """

    original: Callable[[str], dict[str, object]]
    function: Callable[..., object]
    arguments: Mapping[str, object]

    def __call__(self, name: str) -> dict[str, object]:
        data = self.original(name)
        if name == "ignore":
            # What a fork server is told. Newer Pythons have it import the script, but it installs
            # nothing; each of its children does both.
            return {key: value for key, value in data.items() if key != "init_main_from_path"}
        # The working directory comes first until a child has its parent's path, and may hold a torch.py.
        path = f"import sys; sys.path[:] = {data.get('sys_path')!r} or sys.path"
        path += f"; {FOLDER!r} in sys.path or sys.path.append({FOLDER!r})"
        call = UnpickledCall(functools.partial(self.function, **self.arguments))
        return {
            "ampatch_path": UnpickledCall(functools.partial(exec, path)),
            **data,
            f"ampatch {len(data)}": call,
        }


@dataclass(frozen=True, slots=True)
class UnpickledCall:
    """Calls a function where it is unpickled."""

    function: Callable[[], object]

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self.function, ()


# ---- What Python asks ----

BOOTSTRAP = "<frozen importlib._bootstrap>"


class ApexFinder(MetaPathFinder):
    """Finds apex, real or ours; remembers what an installation changed, which `uninstall` undoes."""

    finds_apex = True

    def __init__(self) -> None:
        self._changes = ProgramChanges()
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
        preparation = Preparation(spawn.get_preparation_data, ampatch.apex.install, finder._overrides)
        changes.set_attribute(spawn, "get_preparation_data", preparation)
        fill_loaded(changes)
        return finder

    def override(self, overrides: dict[str, object]) -> None:
        """Gives `initialize` these arguments until `uninstall`, here and in children."""
        self._changes.enter_context(ampatch.override(**overrides))
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
    """Whether a finder is asked for an import, and not by `importlib.util.find_spec`.

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
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {VERSION}\n",
            "top_level.txt": "apex\namp_C\napex_C\n",
        }.get(filename)

    def locate_file(self, path: str) -> Path:
        return Path(__file__).parent / path
