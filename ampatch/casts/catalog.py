"""What the cast tables and a script's own rows say of an op, under each of its names, and at each level."""

from __future__ import annotations

import difflib
import html
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType

import torch
from torch import Tensor

from ampatch import lists
from ampatch.errors import AmpValueError
from ampatch.levels.policy import OPT_LEVELS, Policy
from ampatch.levels.precision import name_dtype
from ampatch.table import Cast, CastTable, Row

# How people write the places, longest first where one begins with another.
SHORT = {name: f"torch.{name}" for name in ("nn.functional", "Tensor", "nn", "linalg", "special", "fft")}
SHORT |= dict.fromkeys(("functional", "F"), "torch.nn.functional")
OPERATORS = {"@": "matmul", "@=": "matmul", "**": "pow", "**=": "__ipow__", "[]=": "__setitem__"}
OPERATORS |= {"+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floor_divide", "%": "remainder"}
OPERATORS |= {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
OPERATORS |= {"&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor"}
OPERATORS |= {"<<": "bitwise_left_shift", ">>": "bitwise_right_shift"}
# Operators whose method is not called like their function.
DUNDERS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_NOT_OPS = ("boolean_dispatch", "assert_int_or_pair")
_ALIAS = re.compile(r"^\s*Alias (?:for|of) :\w+:`~?([\w.]+?)(?:\(\))?`", re.MULTILINE)


class Catalog:
    """The ops of torch and what is said of them; `explain` looks one up.

    `registered` are names that a script added, which come before the rows of the tables.
    """

    def __init__(
        self,
        tables: Iterable[CastTable] = lists.TABLES,
        registered: Iterable[Name] = (),
        version: str = torch.__version__,
    ) -> None:
        self.tables = tuple(tables)
        self.version = version
        self._registered = {name.path: name for name in registered}
        self._rows = _rows_by_path(self.tables)
        self._held = _rows_by_path(table.select(version) for table in self.tables)

    def explain(self, text: str) -> Explanation:
        """Says what happens to an op; one that is given with its place comes first.

        Raises AmpValueError, with names that are close, for what is no op.
        """
        path = expand(text)
        base = self._base(path.rpartition(".")[2])
        paths = self._paths.get(base, [])
        if "." in path and (path in paths or self._is_elsewhere(path)):
            paths = [path, *(other for other in paths if other != path)]
        elif "." not in path and not paths and path in dict(lists.AUTOCAST_WITHOUT_ROW):
            paths = [path]  # of autocast's lists: an op that has no name in Python
        elif "." in path or not paths:
            raise AmpValueError(self._explain_unknown(text, path))
        return Explanation(text, tuple(map(self.describe, paths)))

    def describe(self, path: str) -> Name:
        """Says what happens to one name of an op."""
        if path in self._registered:
            return self._registered[path]
        function = _resolve(path)
        # What is at no place of ours may save, set or compile when it is called.
        is_known = path in self._paths.get(self._base(path.rpartition(".")[2]), ())
        native = promotes(function) if is_known else None
        row = self._held.get(path)
        if row is not None:
            return Name(path, row.cast, row.reason + _unlike_autocast(path), promotes=native)
        reason = dict(lists.AUTOCAST_WITHOUT_ROW).get(path.rpartition(".")[2])
        reason = reason or "no table names it, so it runs in the type of its arguments"
        if path in self._rows:
            reason = _why_not(self._rows[path], self.version)
        return Name(path, None, reason, promotes=native)

    def find(self, function: object) -> str | None:
        """The path by which a function of torch is looked up, one with a row if there is; else None.

        >>> Catalog().find(torch.nn.functional.gelu)
        'torch.nn.functional.gelu'
        """
        held = (path for path in self._held if _resolve(path) is function)
        others = (path for paths in self._paths.values() for path in paths if _resolve(path) is function)
        return next(held, None) or next(others, None)

    # Names

    @cached_property
    def _paths(self) -> dict[str, list[str]]:
        """The names of each op, by the shortest way to write it."""
        groups: dict[str, list[str]] = {}
        places = dict.fromkeys([*(table.target for table in self.tables), "torch.sparse"])
        paths = [f"{target}.{name}" for target in places for name in _ops_of(target)]
        for path in dict.fromkeys([*self._registered, *self._held, *paths]):
            groups.setdefault(self._base(path.rpartition(".")[2]), []).append(path)
        order = {target: index for index, target in enumerate(places)}
        for group in groups.values():  # operators and what works in place come after the functions
            group.sort(key=lambda path: (path.endswith("_"), order.get(path.rpartition(".")[0], -1)))
        return groups

    def _base(self, name: str) -> str:
        """The op that a name is for: `__rmatmul__`, `matmul_` and `matmul` are one.

        torch says itself, in its documentation, which names are aliases: arccos is one of acos.
        """
        base = name
        if re.fullmatch(r"__\w+__", name):
            inner = name.strip("_")
            words = [DUNDERS.get(word, word) for word in (inner, inner[1:] if inner[0] in "ri" else inner)]
            base = next((word for word in words if hasattr(torch, word)), name)
        elif not name.startswith("_"):
            base = name.rstrip("_")
        return self._aliases.get(base, base)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Ops that torch's documentation calls an alias of one with another name."""
        aliases = {}
        for target in ("torch", "torch.special"):
            place = pkgutil.resolve_name(target)
            for name in _ops_of(target):
                match = _ALIAS.search(getattr(place, name).__doc__ or "")
                if match and (other := match[1].rpartition(".")[2]) != name:
                    aliases[name] = other
        return aliases

    def _is_elsewhere(self, path: str) -> bool:
        """Whether a function of torch is at a path, in a place that has no table."""
        places = {table.target for table in self.tables}
        return path.rpartition(".")[0] not in places and isinstance(_resolve(path), _FUNCTIONS)

    def _explain_unknown(self, text: str, path: str) -> str:
        """The message for what is no op."""
        item = _resolve(path if "." in path else f"torch.nn.{path}")
        if isinstance(item, type) and issubclass(item, torch.nn.Module):
            return (
                f"{text!r} is a module, and tables name functions: its forward runs in the types of the "
                f"functions that it calls; look up those"
            )
        close = difflib.get_close_matches(path.rpartition(".")[2], self._paths, n=3, cutoff=0.7)
        hint = f"; close: {', '.join(close)}" if close else ""
        return f"{text!r} is not a known op of torch {self.version}{hint}"


def _rows_by_path(tables: Iterable[CastTable]) -> dict[str, Row]:
    return {f"{table.target}.{row.name}": row for table in tables for row in table.rows}


def expand(text: str) -> str:
    """Writes a place in full.

    >>> expand("F.softmax"), expand("nn.functional.linear"), expand("@"), expand("softmax")
    ('torch.nn.functional.softmax', 'torch.nn.functional.linear', 'matmul', 'softmax')
    """
    text = text.strip().removesuffix("()")
    text = OPERATORS.get(text, text)
    for short, whole in SHORT.items():
        if text.startswith(f"{short}."):
            return whole + text[len(short) :]
    return text


def _unlike_autocast(path: str) -> str:
    """Says where an op parts from torch.autocast on purpose; the list has OpInfo's names, with variants."""
    reasons = [
        f"{op}: {reason}"
        for op, reason in lists.DIFFERENT_FROM_AUTOCAST
        if path in (whole := expand(op), whole.rpartition(".")[0])
    ]
    return f" (unlike torch.autocast: {'; '.join(reasons)})" if reasons else ""


def _why_not(row: Row, version: str) -> str:
    since = f"from torch {row.since} on" if row.since else ""
    until = f"before torch {row.until}" if row.until else ""
    versions = " and ".join(filter(None, (since, until)))
    return f"its row holds only {versions}, and this is {version}; it says: {row.cast.name}, {row.reason}"


def _resolve(path: str) -> object:
    """What is at a path of torch; None if nothing is, or the path is of another package."""
    if path.partition(".")[0] != "torch":
        return None
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def _list_functions(places: Iterable[object]) -> list[str]:
    """The names of functions in modules or classes; of several of one name the last counts."""
    is_function_of = {
        name: isinstance(item, _FUNCTIONS) for place in places for name, item in vars(place).items()
    }
    return [name for name, is_function in is_function_of.items() if is_function]


def _ops_of(target: str) -> list[str]:
    """The functions of a place in torch that take tensors."""
    place = _resolve(target)
    if place is None or "._" in target:  # of another torch, or not for users: its rows are all of it
        return []
    if isinstance(place, type):
        methods = _list_functions(reversed(place.__mro__[:-1]))
        return [name for name in methods if not hasattr(object, name)]
    names = [name for name in _list_functions([place]) if not name.startswith("_")]
    if place is torch:
        # The rest of torch's namespace sets, saves and compiles.
        known = {*dir(torch._C._VariableFunctions), *torch.functional.__all__}
        return [name for name in names if name in known]
    return [name for name in names if name not in _NOT_OPS and "torch_function" not in name]


MEANING = {
    Cast.LOWER: "its floating arguments are cast to the half type of the level",
    Cast.FP32: "its floating arguments are cast to float32",
    Cast.PROMOTE: "its floating arguments are cast to the widest type among them",
    Cast.MATCH_SELF: "its floating arguments are cast to the type of the tensor that is written to",
    Cast.FP32_INPLACE: "computed in float32; what is written into a half tensor is rounded once",
    Cast.BANNED: "raises if an argument is half; allow_banned=True casts it to float32",
    Cast.CUSTOM: "no single cast fits; the reason says what happens",
}
RAISES = "raises"
AS_TORCH = "as torch does"
SEE = "see the reason"


@dataclass(frozen=True, slots=True)
class LevelEffect:
    """The type that an op runs in at one level, by the types of its floating arguments."""

    opt_level: str
    float32: str
    half: str
    mixed: str
    because: str


COLUMNS = ("level", "float32 input", "half input", "mixed inputs", "because")


@dataclass(frozen=True, slots=True)
class Name:
    """One name of an op, and what is said of it; `cast` None: nothing."""

    path: str
    cast: Cast | None
    reason: str
    dtype: torch.dtype | None = None  # registered for this type, whatever the level's is
    promotes: bool | None = None  # whether torch takes mixed types by itself; None: unknown

    def effects(self) -> tuple[LevelEffect, ...]:
        return tuple(self._effect(policy) for policy in OPT_LEVELS.values())

    def _effect(self, policy: Policy) -> LevelEffect:
        native = {True: "float32, by torch", False: "torch refuses", None: AS_TORCH}[self.promotes]
        half = "half" if policy.half is None else name_dtype(policy.half)
        if not policy.patch_torch_functions:
            because = f"the model is {half}; functions are not patched" if policy.casts_model else "no casts"
            return LevelEffect(policy.opt_level, "float32", half, native, because)
        if self.cast is None:
            return LevelEffect(policy.opt_level, "float32", half, native, "no row")
        lower = half if self.dtype is None else name_dtype(self.dtype)
        float32, half_input, mixed = {
            Cast.LOWER: (lower, lower, lower),
            Cast.FP32: ("float32", "float32", "float32"),
            Cast.PROMOTE: ("float32", half, "float32"),
            Cast.MATCH_SELF: ("float32", half, "type of self"),
            Cast.FP32_INPLACE: ("float32", "float32", "float32"),
            Cast.BANNED: ("float32", RAISES, RAISES),
            Cast.CUSTOM: (SEE, SEE, SEE),
        }[self.cast]
        because = f"patched: {self.cast.name}"
        if policy.float8_recipe is not None and self.path.rpartition(".")[2] == "linear":
            because += "; float8 in large nn.Linear, see amp.explain(model)"
        return LevelEffect(policy.opt_level, float32, half_input, mixed, because)

    def heading(self) -> str:
        """What happens to its arguments where functions are patched."""
        if self.dtype is not None:
            return f"{name_dtype(self.dtype)}: its floating arguments are cast to {name_dtype(self.dtype)}"
        return f"{self.cast.name}: {MEANING[self.cast]}" if self.cast else "no row: it is not patched"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What happens to an op, under each of its names, at each level; `str` writes it out."""

    op: str
    names: tuple[Name, ...]

    def groups(self) -> list[tuple[Name, ...]]:
        """The names by what happens to them, in the order of the first of each group."""
        by_effect: dict[object, list[Name]] = {}
        for name in self.names:
            by_effect.setdefault((name.cast, name.effects()), []).append(name)
        return [tuple(names) for names in by_effect.values()]

    def __str__(self) -> str:
        blocks = [f"{self.op}, at each level"]
        for names in self.groups():
            reasons = align([(name.path, name.reason) for name in names])
            table = align([COLUMNS, *map(astuple, names[0].effects())])
            blocks.append("\n".join([names[0].heading(), *(f"  {line}" for line in reasons)]))
            blocks.append("\n".join(f"  {line}" for line in table))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def align(rows: list[tuple[str, ...]]) -> list[str]:
    """Writes rows as lines whose columns begin at the same place.

    >>> align([("level", "input"), ("O0", "float32")])
    ['level  input', 'O0     float32']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


# The ways to give matrices to an op that we do not know: `add(x, y)`, `cat([x, y])`, `addcmul(x, y, y)`.
_CALLS: tuple[Callable[[Callable, Tensor, Tensor], object], ...] = (
    lambda function, x, y: function(x, y),
    lambda function, x, y: function([x, y]),
    lambda function, x, y: function(x, y, y),
    lambda function, x, y: function(x > 0, x, y),
)


def promotes(function: Callable | None) -> bool | None:
    """Whether an op takes a float32 and a float16 matrix together; None if it takes no two matrices.

    Calls it, so `function` must be an op of torch. Call it where nothing is cast.
    """
    function = inspect.unwrap(function)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in _CALLS:
            if _runs(call, function, torch.float32):
                return _runs(call, function, torch.float16)
    return None


def _runs(call: Callable, function: Callable, other: torch.dtype) -> bool:
    x, y = torch.full((2, 2), 0.5), torch.full((2, 2), 0.25, dtype=other)
    try:
        result = call(function, x, y)
    except Exception:  # whatever an op raises for arguments that it does not take
        return False
    return isinstance(result, Tensor)
