"""Runs a script as `python` would: its own `__main__`, arguments, path, exit status and traceback."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from multiprocessing import spawn
from types import CodeType, ModuleType, TracebackType

from ampatch import OPT_LEVELS, AmpValueError
from ampatch.apex.changes import ProgramChanges
from ampatch.apex.drop_in import Preparation
from ampatch.apex.legacy import open_legacy
from ampatch.apex.on_cpu import on_cpu
from ampatch.apex.parallel.distributed import wait_for_gloo_at_exit

STDIN = "-"
HINT = "; the script's own arguments go after --"
OURS = (__file__, importlib.util.__file__, "<frozen importlib", "<frozen zipimport>")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def level_overrides(level: str) -> dict[str, str | None]:
    """Returns what makes `initialize` use a level as it stands: other options might contradict it."""
    options = [name for name in OPT_LEVELS["O0"].options() if name != "allow_banned"]
    if OPT_LEVELS[level].float8_recipe is None:
        options.append("float8_layers")
    return {**dict.fromkeys(options), "opt_level": level}


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its arguments.

    `name` is what follows `python`: a file, a folder or an archive with a `__main__.py`, or `-` for
    the standard input; with `is_module` it is what follows `python -m`. `device` is "cpu" for a script
    that asks for CUDA and gets the CPU; `legacy` puts back what it expects of earlier versions, and
    `unsafe_load` has it load files that hold more than data, too.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    device: str | None = None
    legacy: bool = False
    unsafe_load: bool = False

    def validate(self) -> None:
        """Raises AmpValueError unless the script can be found; none of its code runs."""
        if self.is_module:
            validate_module(self.name)
        elif self.name != STDIN:
            validate_file(self.name)
        if self.legacy:
            open_legacy()
        elif self.unsafe_load:
            raise AmpValueError(
                "--unsafe-load without --legacy: expected both, as torch itself says how to load"
            )

    def run(self) -> int:
        """Runs the script in this process as `__main__`, which it stays; returns 0, its exit status.

        What the script raises passes. If nobody catches it, `sys.excepthook` gets the traceback
        without our frames, as if `python` had run the script.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            wait_for_gloo_at_exit()
        try:
            with as_expected(self.device, self.legacy, self.unsafe_load):
                start = self._prepare()
                exec(start.code, new_main(start))
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook = ScriptHook(sys.excepthook, own_frames(error.__traceback__))
            raise
        return 0

    def _prepare(self) -> Start:
        sys.argv[:] = [self.name, *self.arguments]
        if self.is_module:
            sys.argv[0] = "-m"
            put_first(os.getcwd())
            start = start_of_module(self.name)
            sys.argv[0] = start.file
            return start
        if self.name == STDIN:
            put_first("")
            return Start(compile_source(sys.stdin.buffer.read(), "<stdin>"), "<stdin>", BuiltinImporter)
        path = os.path.join(os.getcwd(), self.name)
        importer = pkgutil.get_importer(path)
        if importer is None:
            put_first(os.path.dirname(os.path.realpath(path)))
            return start_of_file(path)
        put_first(path, always=True)
        return start_of_spec(importer.find_spec("__main__"))


def find_script(arguments: argparse.Namespace) -> Script:
    """Returns the script that options name; raises AmpValueError if there is none, or two."""
    named = [name for name in (arguments.module, arguments.script) if name is not None]
    if len(named) > 1:
        raise AmpValueError(f"-m {arguments.module} and {arguments.script!r}: expected one of them{HINT}")
    if not named or not named[0]:
        raise AmpValueError("no script: expected a Python script, or -m and a module")
    device = getattr(arguments, "device", None)
    flags = {name: bool(getattr(arguments, name, None)) for name in ("legacy", "unsafe_load")}
    return Script(named[0], arguments.script_arguments, arguments.module is not None, device, **flags)


@dataclass(frozen=True, slots=True)
class Start:
    """What is to be executed as `__main__`, and what it finds in its names."""

    code: CodeType
    file: str
    loader: object
    spec: ModuleSpec | None = None


@dataclass(frozen=True, slots=True)
class ScriptHook:
    """Stands in for the script's `sys.excepthook` while its last exception passes through our frames."""

    hook: Hook
    traceback: TracebackType | None

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Gives the script's hook back, and tells it of the error."""
        sys.excepthook = self.hook
        sys.last_traceback = error.__traceback__ = self.traceback
        self.hook(kind, error, self.traceback)


def own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Leaves out the first frames of a traceback, which are ours and those of the import system."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(OURS):
        traceback = traceback.tb_next
    return traceback


def new_main(start: Start) -> dict[str, object]:
    """Makes a new module `__main__` and returns its names: those that `python` gives, in its order."""
    before = vars(sys.modules["__main__"])
    module = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(module)
    names["__package__"] = None if start.spec is None else start.spec.parent
    names["__loader__"] = start.loader
    names["__spec__"] = start.spec
    if "__annotations__" in before:  # of the interpreter's own `__main__`, up to Python 3.13
        names["__annotations__"] = {}
    names["__builtins__"] = sys.modules["builtins"]
    names["__file__"] = start.file
    names["__cached__"] = None if start.spec is None else start.spec.cached
    return names


def put_first(folder: str, always: bool = False) -> None:
    """Puts the script's folder in the first place of sys.path, where `python` had put ours."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def validate_file(name: str) -> None:
    """Raises unless `name` is a file that can be read, or a folder with a `__main__.py`."""
    path = os.path.join(os.getcwd(), name)
    if not os.path.exists(path):
        raise AmpValueError(f"{name!r} does not exist: expected a Python script")
    if name.endswith(".ipynb"):
        raise AmpValueError(
            f"{name!r} is a notebook: expected a Python script, such as `jupyter nbconvert --to script` "
            "makes of it; in the notebook itself ampatch.sweep(train) sweeps a function of (opt_level, seed)"
        )
    importer = pkgutil.get_importer(path)
    if importer is not None and importer.find_spec("__main__") is None:
        kind = "a directory" if os.path.isdir(path) else "an archive"
        raise AmpValueError(f"{name!r} is {kind} without __main__.py: expected a Python script")
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise AmpValueError(f"{name!r} cannot be read: {error.strerror}") from None


def start_of_file(path: str) -> Start:
    """Compiles a file; one that is compiled already (`.pyc`) is taken as it is."""
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is not None:
        return Start(code, path, SourcelessFileLoader("__main__", path))
    with io.open_code(path) as file:
        return Start(compile_source(file.read(), path), path, SourceFileLoader("__main__", path))


def compile_source(source: bytes, name: str) -> CodeType:
    """Compiles a script's text, with no `from __future__ import` of ours."""
    return SourceFileLoader("__main__", name).source_to_code(source, name)


def start_of_spec(spec: ModuleSpec) -> Start:
    return Start(spec.loader.get_code(spec.name), spec.origin, spec.loader, spec)


def validate_module(name: str) -> None:
    """Raises unless there is a module of this name that can be run."""
    if not all(name.split(".")):
        raise AmpValueError(f"{name!r} is not the name of a module: expected one such as package.module")
    before = sys.path[:]
    put_first(os.getcwd())
    is_there = can_be_found(name)
    sys.path[:] = before  # this process may be that of somebody who sweeps a function
    if not is_there:
        hint = f", or leave out -m to run the file {name!r}" if name.endswith(".py") else ""
        raise AmpValueError(f"no module named {name!r}: expected one on sys.path{hint}")


def can_be_found(name: str) -> bool:
    """Looks for a module, a part of its name at a time, and imports nothing where that is enough.

    The packages around it run in the end, when what they raise is the script's own.
    """
    first, *rest = f"{name}.__main__".split(".")
    spec = find_on(first, None)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return spec is not None and part == "__main__"
        below = find_on(f"{spec.name}.{part}", spec.submodule_search_locations)
        if below is None:
            # Some packages make their modules when they are imported.
            return find_spec(name) is not None
        spec = below
    return True


def find_on(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Asks the finders of sys.meta_path, one after the other."""
    specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def find_spec(name: str) -> ModuleSpec | None:
    """Finds a module and imports the packages around it; of a package it finds the `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
    return spec


@contextmanager
def as_expected(device: str | None, legacy: bool, unsafe_load: bool) -> Iterator[None]:
    """Gives a script what it expects of its machine and of its year, also in processes that it spawns."""
    with ProgramChanges() as changes:
        if legacy:
            changes.enter_context(open_legacy(unsafe_load))
        if device is not None:
            changes.enter_context(on_cpu())
        if legacy or device is not None:
            expected = {"device": device, "legacy": legacy, "unsafe_load": unsafe_load}
            preparation = Preparation(spawn.get_preparation_data, expect_to_the_end, expected)
            changes.set_attribute(spawn, "get_preparation_data", preparation)
        yield


def expect_to_the_end(**expected: object) -> None:
    """Gives a spawned process what its parent's script expects."""
    stack = ExitStack()
    stack.enter_context(as_expected(**expected))
    atexit.register(stack.close)  # which also keeps it until then


def start_of_module(name: str) -> Start:
    """Imports the packages around a module and compiles it."""
    spec = find_spec(name)
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return start_of_spec(spec)
