"""Reads which names of apex a script uses, and where, without running it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ampatch.apex.drop_in.missing import EXTENSION_NAMES

ROOTS = frozenset({"apex", "amp_C", "apex_C", *EXTENSION_NAMES})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef)
NAMED = (*FUNCTIONS[:2], ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
IMPORTERS = ("__import__", "import_module", "importlib.import_module")
# `amp = None` is what scripts say where the import failed.
NOTHING = (None, False)

# The names that `from module import *` brings.
StarNames = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Use:
    """A name of apex at a line of a script.

    `keywords` are what a call passes by name. It is not `sure` where the script may mean another
    module by the same name, as after `except ImportError: from torch.cuda import amp`.
    """

    name: str
    line: int
    keywords: tuple[str, ...] = ()
    sure: bool = True


def find_uses(tree: ast.Module, star_names: StarNames) -> list[Use]:
    """Lists the names of apex that a script uses, in the order of its lines."""
    uses = set(uses_in(Scope(tree, None, star_names), star_names))
    return sorted(uses, key=lambda use: (use.line, use.name))


def uses_in(scope: Scope, star_names: StarNames) -> Iterator[Use]:
    """Yields the names that a scope and those in it use; of `a.b.c` the whole, not its parts."""
    inner: set[ast.AST] = set()
    keywords: dict[ast.AST, tuple[str, ...]] = {}
    for node in inside(scope.node):
        if isinstance(node, ast.Call):
            keywords[node.func] = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (Use(name, node.lineno) for name in imported(node))
        elif isinstance(node, SCOPES):
            parent = scope if isinstance(node, ast.ClassDef) else scope.enclosing
            yield from uses_in(Scope(node, parent, star_names), star_names)
        elif node not in inner and is_loaded(node):
            found = scope.resolve(node)
            for name in set(found) - {None}:
                inner.update(bases(node))
                yield Use(name, node.lineno, keywords.get(node, ()), sure=len(set(found)) == 1)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields the names of apex that an import statement says."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if is_apex_name(alias.name))
    elif node.level == 0 and is_apex_name(node.module):
        for alias in node.names:
            yield node.module if alias.name == "*" else f"{node.module}.{alias.name}"


def is_loaded(node: ast.AST) -> bool:
    """Says whether a node may stand for something of apex's."""
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Load)
    return isinstance(node, (ast.Attribute, ast.Call))


def bases(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what an attribute is taken of, and so on."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        if isinstance(node, ast.Attribute):
            node = node.value
        else:
            yield node.func
            node = node.args[0]
        yield node


class Scope:
    """What the names in a module, a class or a function may stand for."""

    def __init__(self, node: ast.AST, parent: Scope | None, star_names: StarNames) -> None:
        self.node = node
        self.parent = parent
        self._star_names = star_names
        # Names of apex as strings, other values as what the script assigns, None for anything else.
        self._names: dict[str, list[str | ast.expr | None]] = defaultdict(list)
        nodes = list(inside(node))
        assigned = {target for child in nodes if is_plain(child) for target in child.targets}
        for child in nodes:
            if child not in assigned:
                self._bind(child)

    @property
    def enclosing(self) -> Scope:
        """The scope that functions in this one look into: methods do not see the names of their class."""
        return self.parent if isinstance(self.node, ast.ClassDef) and self.parent else self

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._names[bound_name(alias)].append(imported_module(alias))
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
        is_apex = node.level == 0 and is_apex_name(node.module)
        for alias in node.names:
            if alias.name != "*":
                yield alias.asname or alias.name, f"{node.module}.{alias.name}" if is_apex else None
            elif is_apex:
                for name in self._star_names(node.module):
                    yield name, f"{node.module}.{name}"

    def find(self, name: str, seen: frozenset[ast.expr] = frozenset()) -> list[str | None]:
        """Returns what a name may stand for: names of apex, and None for anything else."""
        scope = self
        while scope is not None and name not in scope._names:
            scope = scope.parent
        found = []
        for bound in scope._names[name] if scope else ():
            found += scope.resolve(bound, seen) if isinstance(bound, ast.expr) else [bound]
        return found

    def resolve(self, node: ast.expr, seen: frozenset[ast.expr] = frozenset()) -> list[str | None]:
        """Returns what an expression may stand for."""
        if node in seen:
            return []
        seen |= {node}
        if isinstance(node, ast.Name):
            return self.find(node.id, seen)
        if isinstance(node, ast.Attribute):
            return [base and f"{base}.{node.attr}" for base in self.resolve(node.value, seen)]
        if isinstance(node, ast.Call):
            return self._resolve_call(node, seen)
        return [None]

    def _resolve_call(self, node: ast.Call, seen: frozenset[ast.expr]) -> list[str | None]:
        module = imported_by_call(node)
        if module is not None:
            return [module]
        if is_getattr(node):
            return [base and f"{base}.{node.args[1].value}" for base in self.resolve(node.args[0], seen)]
        return [None]


def is_apex_name(name: str | None) -> bool:
    """Says whether a module is one of apex's.

    >>> is_apex_name("apex.parallel"), is_apex_name("apexlib")
    (True, False)
    """
    return name is not None and name.partition(".")[0] in ROOTS


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope; of the scopes in it only the nodes that open them."""
    waiting = list(reversed(own_children(node)))
    while waiting:
        child = waiting.pop()
        yield child
        if isinstance(child, SCOPES):
            waiting += reversed(outer_children(child))
        else:
            waiting += reversed(list(ast.iter_child_nodes(child)))


def own_children(node: ast.AST) -> list[ast.AST]:
    """The nodes below one that opens a scope that are looked up in this scope."""
    if isinstance(node, ast.Lambda):
        return [*arguments(node), node.body]
    if isinstance(node, FUNCTIONS):
        return [*arguments(node), *node.body]
    return list(node.body)


def outer_children(node: ast.AST) -> list[ast.AST]:
    """The nodes of a function or class that are looked up around it: decorators, defaults, bases."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
    if isinstance(node, ast.Lambda):
        return defaults
    hints = [argument.annotation for argument in arguments(node) if argument.annotation]
    return [*node.decorator_list, *defaults, *hints, *([node.returns] if node.returns else ())]


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    """The parameters of a function."""
    given = node.args
    single = [argument for argument in (given.vararg, given.kwarg) if argument]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *single]


def is_plain(node: ast.AST) -> bool:
    """Says whether a node assigns a value to names, and to names alone."""
    return isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)


def bound_name(alias: ast.alias) -> str:
    """Returns the name that `import a.b` or `import a.b as c` binds."""
    return alias.asname or alias.name.partition(".")[0]


def imported_module(alias: ast.alias) -> str | None:
    """Returns what that name stands for if it is apex's."""
    name = alias.name if alias.asname else bound_name(alias)
    return name if is_apex_name(name) else None


def other_names(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node binds in other ways: targets, parameters, functions, handlers."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, NAMED) and node.name:
        yield node.name


def imported_by_call(node: ast.Call) -> str | None:
    """Returns the module of apex's that a call imports, as `importlib.import_module` does."""
    first = node.args[0] if node.args else None
    if ast.unparse(node.func) not in IMPORTERS or not isinstance(first, ast.Constant):
        return None
    if not isinstance(first.value, str) or not is_apex_name(first.value):
        return None
    return first.value.partition(".")[0] if len(node.args) == 1 and is_builtin(node) else first.value


def is_builtin(node: ast.Call) -> bool:
    """Says whether a call is of `__import__`, which returns the first package of a name."""
    return ast.unparse(node.func) == "__import__" and not node.keywords


def is_getattr(node: ast.Call) -> bool:
    """Says whether a call is a `getattr` without a default of a name that is written there."""
    if not isinstance(node.func, ast.Name) or node.func.id != "getattr" or len(node.args) != 2:
        return False
    return isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str)
