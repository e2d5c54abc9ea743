"""Looks whether a script compiles, and whether it can possibly call `initialize`, before it is run."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampatch import AmpValueError
from ampatch.commands.script import STDIN, Script

NAME = "initialize"
# They lead to code that nothing here reads.
RUNS_TEXT = ("exec", "eval", "compile", "__import__")
RUNS_FILES = ("importlib", "runpy", "subprocess")
BINARY = (".so", ".pyd", ".pyc")
# Packages that do not call `initialize` for the script that imports them.
INNOCENT = (
    *(
        "ampatch",
        "apex",
        "torch",
        "torchvision",
        "torchaudio",
        "torchdata",
        "torchtext",
        "triton",
        "functorch",
    ),
    *("numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "cv2", "h5py", "pyarrow", "skimage"),
    *("tqdm", "rich", "yaml", "tensorboard", "tensorboardX", "psutil", "packaging", "typing_extensions"),
)

Place = tuple[Path, tuple[str, ...]]  # a file, and the package that it is in


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the script's own: its path, its code, and the package that it is in."""

    path: Path
    tree: ast.Module
    package: tuple[str, ...]


def validate_source(script: Script) -> None:
    """Raises AmpValueError for a script that does not compile, or that cannot call `initialize`.

    Reads the script and the files beside it that it imports, and runs none of them. A script that imports
    what is not known, or code by name, may do anything.
    """
    path = find_file(script)
    if path is None:
        return
    require_compiles(path)
    if not can_initialize(script, path):
        raise AmpValueError(
            f"{str(path)!r} never calls initialize, and no file beside it that it imports does, so every "
            "level would be the same: add `model, optimizer = amp.initialize(model, optimizer)`"
        )


def find_file(script: Script) -> Path | None:
    """Returns the file that is run first, None if it is not there as text."""
    if script.name == STDIN and not script.is_module:
        return None
    path = Path(*script.name.split(".")) if script.is_module else Path(script.name)
    candidates = [path / "__main__.py", path.with_name(f"{path.name}.py")] if script.is_module else [path]
    if path.is_dir():
        candidates = [path / "__main__.py"]
    found = next((path for path in candidates if path.is_file()), None)
    # Archives and compiled files are run as well.
    return found if found is not None and is_text(found) else None


def is_text(path: Path) -> bool:
    """Says whether a file looks like Python's text, which has no zeros."""
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


def require_compiles(path: Path) -> None:
    """Raises AmpValueError with file and line for what Python cannot read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise AmpValueError(f"{place}: {type(error).__name__}: {error.msg}") from None
    except ValueError as error:
        raise AmpValueError(f"{path}: {error}: expected a Python script") from None


def can_initialize(script: Script, path: Path) -> bool:
    """Says whether a script, or what it imports from its folder, may call `initialize`."""
    root = Path.cwd() if script.is_module else path.parent
    waiting: list[Place] = [(path, ())]
    if script.is_module:
        name = script.name.split(".")
        inside = name if path.name == "__main__.py" else name[:-1]
        waiting = [(path, tuple(inside)), *find_local(name, root)]
    seen: set[Path] = set()
    while waiting:
        place = waiting.pop()
        if place[0].resolve() in seen:
            continue
        seen.add(place[0].resolve())
        source = read_source(*place)
        if source is None or mentions(source.tree):
            return True
        for name in imports(source):
            files = find_local(name, root)
            if not files and not is_innocent(name):
                return True
            waiting += files
    return False


def read_source(path: Path, package: tuple[str, ...]) -> Source | None:
    """Parses a file, None if it cannot be."""
    if path.suffix in BINARY:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Source(path, ast.parse(path.read_bytes()), package)
    except (SyntaxError, ValueError, OSError, RecursionError):
        return None


def mentions(tree: ast.Module) -> bool:
    """Says whether code has `initialize` in a name or a text, or runs code that it makes or finds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in RUNS_TEXT:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and set(RUNS_FILES).intersection(words(node)):
            return True
        if NAME in words(node):
            return True
    return False


def words(node: ast.AST) -> list[str]:
    """Returns the names in a node itself, and the words of its text."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [word for alias in node.names for word in alias.name.split(".")]
    if isinstance(node, ast.ImportFrom):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"\W+", node.value)
    return []


def imports(source: Source) -> Iterator[tuple[str, ...]]:
    """Yields the full names of modules that a file imports, and of what may be modules in them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = source.package[: len(source.package) - node.level + 1] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            if module:
                yield from ((*module, alias.name) for alias in node.names)


def find_local(name: Sequence[str], root: Path) -> list[Place]:
    """Returns the files below `root` that run when a module is imported, with the packages they are in."""
    found: list[Place] = []
    for length in range(1, len(name) + 1):
        part, place = tuple(name[:length]), root.joinpath(*name[:length])
        candidates = [(place / "__init__.py", part)]
        candidates += [(place.with_name(f"{place.name}{end}"), part[:-1]) for end in (".py", *BINARY)]
        # A folder without an `__init__.py` is a package as well.
        found += [candidate for candidate in candidates if candidate[0].is_file()][:1]
    return found


def is_innocent(name: Sequence[str]) -> bool:
    """Says whether a module from elsewhere is known not to call `initialize` for the script."""
    return name[0] in INNOCENT or name[0] in sys.stdlib_module_names
