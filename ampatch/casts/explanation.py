"""What happens to an op at each level, in words, and whether torch takes two types by itself."""

from __future__ import annotations

import html
import inspect
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from ampatch.levels.policy import OPT_LEVELS, Policy
from ampatch.levels.precision import name_dtype
from ampatch.table import Cast

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
        float32, of_half, mixed = {
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
        return LevelEffect(policy.opt_level, float32, of_half, mixed, because)

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
        """Shows a notebook what `str` writes."""
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
