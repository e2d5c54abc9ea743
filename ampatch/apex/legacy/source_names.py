"""Reads what the names in a script stand for, and of which type its tensors are, without running it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampatch.apex.drop_in import ROOTS

IMPORTERS = ("import_module", "importlib.import_module")
# `amp = None` is what scripts say where the import failed.
NOTHING = (None, False)

NUMPY = ("np", "numpy")  # whose bytes are pictures more often than masks

# What `from module import *` brings, by name; the number is that of the dots before the module.
Bring = Callable[[str, int], Mapping[str, str]]


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
        match node:
            case ast.Import() | ast.ImportFrom():
                uses.update(Use(name, node.lineno) for name in imported(node, names.roots))
            case ast.Name(ctx=ast.Load()) | ast.Attribute() | ast.Call() if node not in inner:
                meanings = set(names.resolve(node))
                inner.update(bases(node) if meanings - {None} else ())
                uses.update(Use(name, node.lineno, sure=len(meanings) == 1) for name in meanings - {None})
    return sorted(uses, key=lambda use: (use.line, use.name))


def imported(node: ast.Import | ast.ImportFrom, roots: frozenset[str]) -> Iterator[str]:
    """Yields the names of these packages that an import statement says."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if is_of(alias.name, roots))
    elif node.level == 0 and is_of(node.module, roots):
        for alias in node.names:
            yield node.module if alias.name == "*" else f"{node.module}.{alias.name}"


def bases(node: ast.AST) -> Iterator[ast.AST]:
    while isinstance(node, ast.Attribute):
        node = node.value
        yield node


class Names:
    """What the names in a script may stand for, wherever in it they are bound."""

    def __init__(self, tree: ast.Module, bring: Bring, roots: frozenset[str] = ROOTS) -> None:
        self._bring_from = bring
        self.roots = roots
        # Names of the packages as strings, other values as what the script assigns, None for the rest.
        self._names: dict[str, list[str | ast.expr | None]] = defaultdict(list)
        # Names for the parts of a value, as in `a, b = value`.
        self.parts: dict[str, list[ast.expr]] = defaultdict(list)
        # What attributes are set to, and what functions and methods return, by their names.
        self.attributes: dict[str, list[ast.expr]] = defaultdict(list)
        self.returns: dict[str, list[ast.expr]] = {}
        self.makes_bytes = False  # somewhere in the script
        self.cut: set[ast.AST] = set()  # what is made an integer where it is computed
        assigned: set[ast.AST] = set()  # targets that are known by what is assigned to them
        for node in ast.walk(tree):
            if node not in assigned:
                assigned.update(self._bind(node))

    def _bind(self, node: ast.AST) -> Sequence[ast.AST]:
        match node:
            case ast.Import():
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    whole = alias.name if alias.asname else bound
                    self._names[bound].append(whole if is_of(whole, self.roots) else None)
            case ast.ImportFrom():
                for name, whole in self._imported_names(node):
                    self._names[name].append(whole)
            case ast.Assign(targets, value) if all(isinstance(target, ast.Name) for target in targets):
                if not (isinstance(value, ast.Constant) and value.value in NOTHING):
                    for target in targets:
                        self._names[target.id].append(value)
                return targets
            case ast.Assign([ast.Attribute(attr=name)], value):
                self.attributes[name].append(value)
            case ast.Attribute(of, "byte" | "ByteTensor" | "uint8") if ast.unparse(of) not in NUMPY:
                self.makes_bytes = True
            case ast.Call(ast.Name("int"), [value]) | ast.Call(
                ast.Attribute(value, "long" | "int" | "floor")
            ):
                self.cut.update(ast.walk(value))
            case ast.Assign([ast.Tuple(parts), *_], value):
                for part in parts:
                    if isinstance(part, ast.Name):
                        self.parts[part.id].append(value)
            case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
                self._names[name].append(None)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                self._names[name].append(None)
                returns = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
                self.returns.setdefault(name, []).extend(each.value for each in returns if each.value)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(str(name)):
                self._names[name].append(None)
        return ()

    def _imported_names(self, node: ast.ImportFrom) -> Iterator[tuple[str, str | None]]:
        module = node.module or ""
        is_known = node.level == 0 and is_of(module, self.roots)
        for alias in node.names:
            if alias.name == "*":
                yield from self._bring_from(module, node.level).items()
            elif is_known:
                yield alias.asname or alias.name, f"{module}.{alias.name}"
            else:
                yield alias.asname or alias.name, self._bring_from(module, node.level).get(alias.name)

    def exported(self) -> dict[str, str]:
        """Returns what stands for something of the packages, and for nothing else."""
        return {
            name: ways[0] for name, ways in self._names.items() if len(ways) == 1 and isinstance(ways[0], str)
        }

    def resolve(self, node: ast.expr, visited: frozenset[ast.expr] = frozenset()) -> list[str | None]:
        """Returns what an expression may stand for: names of apex, and None for anything else."""
        if node in visited:
            return []
        visited |= {node}
        match node:
            case ast.Name(name):
                bound = self._names.get(name, ())
                ways = (self.resolve(way, visited) if isinstance(way, ast.expr) else [way] for way in bound)
                return [meaning for way in ways for meaning in way]
            case ast.Attribute(value, name):
                return [base and f"{base}.{name}" for base in self.resolve(value, visited)]
            case ast.Call(function, [ast.Constant(str(name)), *_]):
                is_import = ast.unparse(function) in IMPORTERS and is_of(name, self.roots)
                return [name if is_import else None]
        return [None]

    def values(self, node: ast.expr) -> list[str | ast.expr | None]:
        """Returns what is assigned to a name; of any other expression itself."""
        return list(self._names.get(node.id, ())) if isinstance(node, ast.Name) else [node]


def is_of(name: str | None, roots: frozenset[str]) -> bool:
    """Says whether a module is of one of these packages.

    >>> is_of("apex.parallel", ROOTS), is_of("apexlib", ROOTS)
    (True, False)
    """
    return name is not None and name.partition(".")[0] in roots


# ---- Types of tensors ----

# Methods and functions whose tensor is of the type of the one that they take.
KEEP = re.compile(
    r"(un)?squeeze|view(_as)?|reshape|expand(_as)?|repeat|t|transpose|permute|contiguous|clone|detach|flatten"
    r"|cuda|cpu|to|numpy|from_numpy|as_tensor|tensor|triu|tril|flip|roll|cat|stack|chunk|split|unbind|index_select"
    r"|masked_fill_?|clamp_?|Variable|Parameter|array|asarray|concatenate"
)
# What makes tensors of bools, or of another type that the name says, or of floats.
OTHERS = re.compile(
    r"eq|ne|gt|lt|ge|le|bool|logical_\w+|any|all|is\w+|\w+Tensor|float|half|double|long|int"
    r"|ones|zeros|full|empty|randn?|softmax"
)
BYTES = re.compile(r"uint8|ByteTensor")
INTEGERS = re.compile(r"u?int(8|16|32|64)?|long|short|(Byte|Char|Short|Int|Long)Tensor")
# What makes tensors of integers without a word of their type.
COUNTS = re.compile(r"arange|randint|argmax|argmin|argsort|nonzero|randperm|long|int|short|byte")


def is_perhaps_bytes(node: ast.expr, names: Names) -> bool:
    """Whether a mask is of bytes, or may be: nothing shows what it is, and the script makes such masks."""
    ways = {*trace_types(node, names, re.compile("byte"), BYTES)}
    return True in ways or (None in ways and names.makes_bytes)


def is_byte_tensor(node: ast.expr, names: Names) -> bool:
    return True in trace_types(node, names, re.compile("byte"), re.compile("ByteTensor"))


def is_integral(node: ast.expr, names: Names) -> bool:
    return True in trace_types(node, names, COUNTS, INTEGERS)


def trace_types(
    node: ast.AST, names: Names, makers: re.Pattern, types: re.Pattern, visited: set[ast.AST] | None = None
) -> Iterator[bool | None]:
    """Yields for each way in which a value is made whether it is of these types; None if nothing shows it.

    `makers` are methods and functions that make such values, `types` what others are told. What was
    `visited` is not looked at again: a name that is set in many lines leads to itself in many ways.
    """
    visited = set() if visited is None else visited

    def below(*nodes: object) -> Iterator[bool | None]:
        for each in nodes:
            if each is None:
                yield None
            elif isinstance(each, ast.AST) and each not in visited:
                visited.add(each)
                yield from trace_types(each, names, makers, types, visited)

    match node:
        case ast.Name(name):
            yield from below(*names.values(node), *names.parts.get(name, ()))
        case ast.Attribute(value, "T" | "data"):
            yield from below(value)
        case ast.Attribute(attr=name):
            yield from below(*names.attributes.get(name, [None]))
        case ast.Subscript(value) | ast.Starred(value):
            yield from below(value)
        case ast.BinOp(left, _, right):
            yield from below(left, right)
        case ast.UnaryOp(ast.Invert(), value):
            yield from below(value)
        case ast.IfExp(_, first, second):
            yield from below(first, second)
        case ast.Tuple(elts) | ast.List(elts):
            yield from below(*elts)
        case ast.Call():
            yield from trace_call_types(node, names, makers, types, below)
        case _:
            yield False


def trace_call_types(node: ast.Call, names: Names, makers: re.Pattern, types: re.Pattern, below) -> Iterator:
    """Yields the same of what a call returns."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    said_types = [each for each in types_of(node) if each]
    if said_types:
        yield any(types.fullmatch(each) for each in said_types)
    elif makers.fullmatch(name) or types.fullmatch(name):
        yield True
    elif name in names.returns:
        yield from below(*names.returns[name])
    elif KEEP.fullmatch(name):
        receiver = getattr(node.func, "value", None)
        is_module = receiver is None or any(isinstance(each, str) for each in names.values(receiver))
        yield from below(*(node.args[:1] if is_module else [receiver]))
    else:
        yield False if OTHERS.fullmatch(name) else None


def types_of(node: ast.Call) -> Iterable[str]:
    """Yields the types that a call is told: `dtype=torch.uint8`, `x.to(torch.uint8)`, `x.astype("uint8")`."""
    for word in node.keywords:
        if word.arg == "dtype":
            yield last_of(word.value)
    if getattr(node.func, "attr", "") in ("to", "type", "astype"):
        for argument in node.args:
            name = last_of(argument)
            yield name if re.fullmatch(r"u?int\d*|bool_?|float\d*|half|double|long|\w+Tensor", name) else ""


def last_of(node: ast.expr) -> str:
    """Returns the last word of a name, or of a text."""
    text = str(getattr(node, "value", "")) if isinstance(node, ast.Constant) else ast.unparse(node)
    return text.rpartition(".")[2]
