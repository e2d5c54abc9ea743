"""Reads which names of apex a script uses, and where, without running it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ampatch.apex.drop_in.missing import EXTENSION_NAMES

ROOTS = frozenset({"apex", "amp_C", "apex_C", *EXTENSION_NAMES})
# Nodes that bind a name in their own attribute `name`.
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
IMPORTERS = ("import_module", "importlib.import_module")
# `amp = None` is what scripts say where the import failed.
NOTHING = (None, False)

# The names that `from module import *` brings.
StarNames = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Use:
    """A name of apex at a line of a script.

    It is not `sure` where the script may mean another module by the same name, as after
    `except ImportError: from torch.cuda import amp`.
    """

    name: str
    line: int
    sure: bool = True


def find_uses(tree: ast.Module, names: Names) -> list[Use]:
    """Lists the names that a script uses of apex, or of other packages, by line; of `a.b.c` the whole."""
    uses: set[Use] = set()
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):  # what is around comes before what is inside
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            uses.update(Use(name, node.lineno) for name in imported(node, names.roots))
        elif node not in inner and is_loaded(node):
            found = set(names.resolve(node))
            inner.update(bases(node) if found - {None} else ())
            for name in found - {None}:
                uses.add(Use(name, node.lineno, sure=len(found) == 1))
    return sorted(uses, key=lambda use: (use.line, use.name))


def imported(node: ast.Import | ast.ImportFrom, roots: frozenset[str]) -> Iterator[str]:
    """Yields the names of these packages that an import statement says."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if is_of(alias.name, roots))
    elif node.level == 0 and is_of(node.module, roots):
        for alias in node.names:
            yield node.module if alias.name == "*" else f"{node.module}.{alias.name}"


def is_loaded(node: ast.AST) -> bool:
    """Says whether a node may stand for something of apex's."""
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.Attribute, ast.Call))


def bases(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what an attribute is taken of, and so on."""
    while isinstance(node, ast.Attribute):
        node = node.value
        yield node


class Names:
    """What the names in a script may stand for, wherever in it they are bound."""

    def __init__(self, tree: ast.Module, star_names: StarNames, roots: frozenset[str] = ROOTS) -> None:
        self._star_names = star_names
        self.roots = roots
        # Names of the packages as strings, other values as what the script assigns, None for the rest.
        self._names: dict[str, list[str | ast.expr | None]] = defaultdict(list)
        # Names for the parts of a value, as in `a, b = value`.
        self.parts: dict[str, list[ast.expr]] = defaultdict(list)
        assigned: set[ast.AST] = set()
        for node in ast.walk(tree):
            if is_plain(node):
                assigned.update(node.targets)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                for target in node.targets[0].elts:
                    self.parts[getattr(target, "id", "")].append(node.value)
            if node not in assigned:
                self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._names[bound_name(alias)].append(imported_module(alias, self.roots))
        elif isinstance(node, ast.ImportFrom):
            for name, whole in self._imported_names(node):
                self._names[name].append(whole)
        elif is_plain(node):
            if not (isinstance(node.value, ast.Constant) and node.value.value in NOTHING):
                for target in node.targets:
                    self._names[target.id].append(node.value)
        else:
            for name in other_names(node):
                self._names[name].append(None)

    def _imported_names(self, node: ast.ImportFrom) -> Iterator[tuple[str, str | None]]:
        is_known = node.level == 0 and is_of(node.module, self.roots)
        for alias in node.names:
            if alias.name != "*":
                yield alias.asname or alias.name, f"{node.module}.{alias.name}" if is_known else None
            elif is_known:
                yield from ((name, f"{node.module}.{name}") for name in self._star_names(node.module))

    def resolve(self, node: ast.expr, seen: frozenset[ast.expr] = frozenset()) -> list[str | None]:
        """Returns what an expression may stand for: names of apex, and None for anything else."""
        if node in seen:
            return []
        seen |= {node}
        if isinstance(node, ast.Name):
            bound = self._names.get(node.id, ())
            ways = (self.resolve(way, seen) if isinstance(way, ast.expr) else [way] for way in bound)
            return [found for way in ways for found in way]
        if isinstance(node, ast.Attribute):
            return [base and f"{base}.{node.attr}" for base in self.resolve(node.value, seen)]
        return [imported_by_call(node, self.roots) if isinstance(node, ast.Call) else None]

    def values(self, node: ast.expr) -> list[str | ast.expr | None]:
        """Returns what is assigned to a name; of any other expression itself."""
        return list(self._names.get(node.id, ())) if isinstance(node, ast.Name) else [node]


def is_of(name: str | None, roots: frozenset[str]) -> bool:
    """Says whether a module is of one of these packages.

    >>> is_of("apex.parallel", ROOTS), is_of("apexlib", ROOTS)
    (True, False)
    """
    return name is not None and name.partition(".")[0] in roots


def is_plain(node: ast.AST) -> bool:
    """Says whether a node assigns a value to names, and to names alone."""
    return isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)


def bound_name(alias: ast.alias) -> str:
    """Returns the name that `import a.b` or `import a.b as c` binds."""
    return alias.asname or alias.name.partition(".")[0]


def imported_module(alias: ast.alias, roots: frozenset[str]) -> str | None:
    """Returns what that name stands for if it is one of the packages'."""
    name = alias.name if alias.asname else bound_name(alias)
    return name if is_of(name, roots) else None


def other_names(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node binds in other ways: targets, parameters, functions, handlers."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, NAMED) and node.name:
        yield node.name


def imported_by_call(node: ast.Call, roots: frozenset[str]) -> str | None:
    """Returns the module of these packages that a call imports, as `importlib.import_module` does."""
    first = node.args[0] if node.args else None
    if ast.unparse(node.func) not in IMPORTERS or not isinstance(first, ast.Constant):
        return None
    return first.value if isinstance(first.value, str) and is_of(first.value, roots) else None
