"""Says which of the names of apex that a script uses are provided, by looking at our modules."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import ampatch
import ampatch as amp
import ampatch.apex
from ampatch.apex import amp as apex_amp
from ampatch.apex.drop_in.mirror import EXTENSIONS, OURS, PARTS, own_name
from ampatch.apex.drop_in.missing import explain
from ampatch.apex.drop_in.real import public_names
from ampatch.apex.uses import Use, find_uses


@dataclass(frozen=True, slots=True)
class Name:
    """A name of apex, the lines of a script that use it, and why it is not provided, if so."""

    name: str
    lines: tuple[int, ...]
    fault: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The names of apex that one script uses."""

    path: Path
    names: tuple[Name, ...]

    @property
    def missing(self) -> tuple[Name, ...]:
        """Those that are not provided."""
        return tuple(name for name in self.names if name.fault)


def check_file(path: Path) -> Report:
    """Reads a script, without running it; raises AmpValueError if Python could not read it either."""
    if path.suffix == ".ipynb":  # which is an expression of Python's as well
        raise amp.AmpValueError(f"'{path}' is a notebook: expected a Python script, so export it as one")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise amp.AmpValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"'{path}', line {line}" if line else f"'{path}'"
        said = getattr(error, "msg", error)
        raise amp.AmpValueError(f"{place}: {said}; expected a script for this Python") from None
    lines: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    with live_state():
        for use in find_uses(tree, star_names):
            for name, fault in judge(use):
                lines[name, fault].append(use.line)
    names = (Name(name, tuple(dict.fromkeys(at)), fault) for (name, fault), at in lines.items())
    return Report(path, tuple(sorted(names, key=lambda name: name.name)))


@contextmanager
def live_state() -> Iterator[None]:
    """Opens a session while the context is open: some attributes of `amp._amp_state` are there only then."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    apex_amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    try:
        yield
    finally:
        amp.uninitialize()


def star_names(module: str) -> tuple[str, ...]:
    """Returns what `from module import *` brings."""
    own = find(module)
    return tuple(name for name, _ in public_names(own.__name__)) if isinstance(own, ModuleType) else ()


def judge(use: Use) -> Iterator[tuple[str, str | None]]:
    """Yields the name that a use is of, and why it is not provided, if so; then its bad keywords."""
    known, value, rest = walk(use.name)
    if not rest:
        yield known, None
        for word in bad_keywords(value, use.keywords):
            yield f"{known}({word}=)", f"{known} takes no argument {word!r}"
        return
    fault = explain(use.name)
    if fault is not None:
        yield use.name, fault
    elif use.sure:
        close = difflib.get_close_matches(rest[0], dir(value), 1)
        yield use.name, f"{known} has no {rest[0]!r}" + "".join(f"; close: {each}" for each in close)


def find(name: str) -> object:
    """Returns what a name of apex stands for here, None if it is not provided."""
    _, value, rest = walk(name)
    return None if rest else value


def walk(name: str) -> tuple[str, object, tuple[str, ...]]:
    """Follows a name as far as it goes: returns that part, what it stands for, and what is left."""
    first, *rest = name.split(".")
    if first in EXTENSIONS:
        return follow(first, importlib.import_module(own_name(first)), tuple(rest))
    if first == "apex":
        return follow(first, ampatch.apex, tuple(rest))
    return first, None, (first,)


def follow(known: str, value: object, rest: tuple[str, ...]) -> tuple[str, object, tuple[str, ...]]:
    """Follows what is left of a name, from what the part before stands for."""
    if not rest or is_special(rest[0]) or not can_look_into(value):
        return known, value, ()
    # `apex.amp._amp_state` is an object, and in `from apex.amp._amp_state import ...` a module.
    ways = [follow(f"{known}.{rest[0]}", each, rest[1:]) for each in step(value, rest[0])]
    return min(ways, key=lambda way: len(way[2]), default=(known, value, rest))


def is_special(name: str) -> bool:
    """Says whether a name is one that Python gives, such as `__doc__`."""
    return name.startswith("__") and name.endswith("__")


def can_look_into(value: object) -> bool:
    """Says whether the attributes of a value can be told: those of our modules, classes and objects."""
    if isinstance(value, ModuleType):
        return True
    cls = value if isinstance(value, type) else type(value)
    return cls.__module__.startswith(OURS)


def step(value: object, name: str) -> Iterator[object]:
    """Yields what an attribute stands for, and a submodule of that name."""
    if value is ampatch.apex:
        if name in PARTS:
            yield importlib.import_module(own_name(f"apex.{name}"))
        return
    if name in vars(value) or (not isinstance(value, ModuleType) and hasattr(value, name)):
        yield getattr(value, name)
    if isinstance(value, ModuleType) and hasattr(value, "__path__"):
        whole = f"{value.__name__}.{name}"
        if importlib.util.find_spec(whole) is not None:
            yield importlib.import_module(whole)


def bad_keywords(value: object, given: tuple[str, ...]) -> list[str]:
    """Returns the keywords that a function or class of ours does not take."""
    if not given or not callable(value):
        return []
    try:
        taken = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return []
    return [word for word in given if word not in {parameter.name for parameter in taken}]
