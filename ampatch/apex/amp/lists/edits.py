"""What scripts changed in the lists of apex.amp, carried over to ampatch's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import torch

import ampatch as amp
from ampatch import lists
from ampatch.table import Cast

REGISTER: dict[str, Callable[[object, str], None]] = {
    "FP16_FUNCS": amp.register_half_function,
    "BFLOAT16_FUNCS": amp.register_bfloat16_function,
    "FP32_FUNCS": amp.register_float_function,
    "CASTS": amp.register_promote_function,
}
CASTS = {"FP16_FUNCS": "LOWER", "BFLOAT16_FUNCS": "LOWER", "FP32_FUNCS": "FP32", "CASTS": "PROMOTE"}
# One function has a name in each; `F.softmax` calls the method.
PLACES = {"torch.nn.functional": torch.nn.functional, "torch": torch, "torch.Tensor": torch.Tensor}


def list_names(target: str, cast: str) -> list[str]:
    """Returns the names of a table's functions with a cast."""
    rows = [row for table in lists.TABLES if table.target == target for row in table.rows]
    return sorted({row.name for row in rows if row.cast is Cast[cast]})


def list_banned(target: str) -> list[tuple[str, str]]:
    """Returns the names of a table's banned functions, with the reason."""
    rows = [row for table in lists.TABLES if table.target == target for row in table.rows]
    return [(row.name, row.reason) for row in rows if row.cast is Cast.BANNED]


def list_functions(target: str) -> tuple[list, ...]:
    """Returns the lists of a table in apex's order: half (twice), float32, widest, banned, sequences."""
    half, full, widest = (list_names(target, cast) for cast in ("LOWER", "FP32", "PROMOTE"))
    sequences = [name for name in ("cat", "stack") if hasattr(PLACES[target], name)]
    return half, [*half], full, widest, list_banned(target), sequences


def register_edits(overrides: Iterable[ModuleType]) -> bool:
    """Registers the functions that a script put into a list or took out of one.

    What is in no list any more runs in the type of its arguments, the widest if they differ. Says
    whether a banned function was taken out, and so is allowed.
    """
    is_allowed = False
    for module in overrides:
        target = next(path for path, place in PLACES.items() if place is module.MODULE)
        for name, register in dict(_find_edits(module, target)).items():
            for place in _find_places(target, name):
                register(place, name)
        is_allowed |= len(module.BANNED_FUNCS) < len(list_banned(target))
    return is_allowed


def _find_edits(module: ModuleType, target: str) -> list[tuple[str, Callable[[object, str], None]]]:
    """Lists what was taken out of a list, and then what was put into one, which counts more."""
    taken, put = [], []
    for kind, register in REGISTER.items():
        before, now = list_names(target, CASTS[kind]), getattr(module, kind)
        if kind != "BFLOAT16_FUNCS":  # the same functions as FP16_FUNCS
            taken += [(name, amp.register_promote_function) for name in before if name not in now]
        put += [(name, register) for name in now if name not in before]
    return taken + put


def _find_places(target: str, name: str) -> list[object]:
    """Returns the module that a list is about, and the others that have a row of this name."""
    known = {table.target for table in lists.TABLES if any(row.name == name for row in table.rows)}
    return [place for path, place in PLACES.items() if path == target or path in known]
