"""Follows the imports of a script to the files that stand beside it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ampatch.apex.checking.uses import Names, is_of
from ampatch.apex.drop_in.mirror import ROOTS
from ampatch.apex.legacy.finding import ROOTS as LEGACY
from ampatch.apex.legacy.finding import parse

MAKES_BYTES = re.compile(rb"\.byte\(\)|torch\.uint8|ByteTensor")


class Modules:
    """The modules beside a script: which of them it imports, and what these bring of other packages."""

    def __init__(self, script: Path, star_names: Callable[[str], Iterable[str]]) -> None:
        self._script = script
        self._folders = own_roots(script)
        self._roots = LEGACY - (own_names(script.parent) - ROOTS)
        self._star_names = star_names
        self._exported: dict[Path, Mapping[str, str]] = {}

    def follow(self) -> Iterator[Path]:
        """Yields the script and the files that it imports, and so on, each once; runs nothing."""
        waiting, seen = [self._script], set()
        while waiting:
            path = waiting.pop(0)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
                waiting += imported_files(path, self._find)

    def names(self, path: Path, tree: ast.Module) -> Names:
        """Returns what names stand for in a file."""
        names = Names(tree, functools.partial(self._bring, path), self._roots)
        names.makes_bytes |= self._makes_bytes
        return names

    @functools.cached_property
    def _makes_bytes(self) -> bool:
        texts = (path.read_bytes() for path in self.follow() if path.is_file())
        return any(MAKES_BYTES.search(text) for text in texts)

    def _find(self, module: str) -> Iterator[Path]:
        """Yields the files of a module; a script that imports from its folder's name means it."""
        is_folder = module.partition(".")[0] == self._script.absolute().parent.name
        around = [self._script.absolute().parents[1]] if is_folder else []
        yield from find_files(module, [*self._folders, *around])

    def _bring(self, path: Path, module: str, level: int) -> Mapping[str, str]:
        if level == 0 and is_of(module, self._roots):
            return {name: f"{module}.{name}" for name in self._star_names(module)}
        begin = above(path, level)
        files = [*(find_files(module, begin) if begin else self._find(module))]
        return self._export(files[-1]) if files else {}

    def _export(self, path: Path) -> Mapping[str, str]:
        if path not in self._exported:
            self._exported[path] = {}  # for modules that import each other
            with suppress(OSError, SyntaxError, ValueError):
                tree, _ = parse(path.read_bytes(), str(path))
                self._exported[path] = self.names(path, tree).exported()
        return self._exported[path]


def own_roots(script: Path) -> list[Path]:
    """Returns the folders that a script's own modules are in: its own, and that of the package around it."""
    top = script.parent
    while (top / "__init__.py").exists() and top != top.parent:
        top = top.parent
    return list(dict.fromkeys([script.parent, top]))


def own_names(folder: Path) -> set[str]:
    """Returns the names of the packages and modules in a script's folder, which come before all others."""
    modules = {path.stem for path in folder.glob("*.py")}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")}


def above(path: Path, level: int) -> Sequence[Path]:
    """Returns the folder where a relative import of so many dots begins, none for another."""
    whole = path if level <= len(path.parents) else path.absolute()
    return whole.parents[level - 1 : level] if level else ()


def imported_files(path: Path, find: Callable[[str], Iterable[Path]]) -> Iterator[Path]:
    """Yields the files that the imports of a file run, as `find` finds them; apex is none of them."""
    with suppress(OSError, SyntaxError, ValueError):  # of which check_file says more
        tree, _ = parse(path.read_bytes(), str(path))
        for node in ast.walk(tree):
            begin = above(path, getattr(node, "level", 0))
            match node:
                case ast.Import(aliases):
                    names = [alias.name for alias in aliases]
                case ast.ImportFrom(module, aliases):
                    names = [f"{module or ''}.{alias.name}".strip(".") for alias in aliases]
                case ast.Call(function, [ast.Constant(str(name)), *_]):
                    names = [name] if ast.unparse(function).endswith("import_module") else []
                case _:
                    continue
            for name in names:
                if begin:
                    yield from find_files(name, begin)
                elif not is_of(name, ROOTS):
                    yield from find(name)


def find_files(module: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yields the files that Python would run for a module, where the first of these folders has it."""
    first, _, rest = module.partition(".")
    for folder in folders:
        package, file = folder / first / "__init__.py", folder / f"{first}.py"
        if package.is_file():
            yield package
        elif file.is_file():
            yield file
            return
        elif not (folder / first).is_dir():
            continue
        if rest:
            yield from find_files(rest, [folder / first])
        return
