"""Finds functions by identity in what programs keep: modules, classes, containers, closures and models."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace

import torch

from ampatch.patching.bound_names.loaded_modules import LoadedModules, is_installed, read_globals
from ampatch.patching.bound_names.slots import Attribute, Change, Item, PartialPart, Slot

_OWN_OF_MODULES = frozenset(vars(torch.nn.Module()))
_MAX_DEPTH = 6
_MAX_LENGTH = 10_000  # of a container: data, not a choice of functions

logger = logging.getLogger("ampatch")

Replacements = Mapping[int, tuple[object, object]]  # id of what is looked for: itself, what takes its place


class Search:
    """Replaces objects by others wherever programs keep them, and lists the changes it made.

    It looks into modules, classes, dictionaries, lists, tuples, `functools.partial`s, default
    arguments, closures and instances of classes, but not into those of Python and of torch. Only
    identity counts: nothing is called, compared or asked for attributes that are computed. A change comes
    with the innermost `nn.Module` that it was found in, None for what belongs to the program.
    """

    def __init__(self, replacements: Replacements, modules: LoadedModules) -> None:
        self._replacements = replacements
        self._modules = modules
        self._seen: dict[int, object] = {}  # kept, so that no id is used again
        self._walks: dict[type, Callable[[object, int], None]] = {}
        self._slots: dict[type, tuple[str, ...]] = {}
        self._owner: torch.nn.Module | None = None  # the module inside of which the search is
        self.changes: list[tuple[torch.nn.Module | None, Change]] = []

    def search_modules(self, *, only_names: bool = False) -> None:
        """Looks through loaded modules; `only_names`: at the globals alone of those searched before."""
        for module in self._modules.list_searched():
            is_known = self._modules.mark_searched(module)
            names = read_globals(module)
            depth = 0 if only_names and is_known and names.get("__name__") != "__main__" else _MAX_DEPTH
            self._search_globals(names, depth, is_installed(names))

    def search_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Looks through models: what their parts and the classes of these keep."""
        for model in models:
            for module in model.modules():
                self._owner = module
                self._walk_attributes(module, _MAX_DEPTH)
                self._owner = None
                for kind in type(module).__mro__:
                    self._translate(kind, _MAX_DEPTH)

    def _search_globals(self, names: dict[str, object], depth: int, is_package: bool) -> None:
        # What packages keep under private names is theirs, but for the functions they import.
        for name, value in list(names.items()):
            is_private = is_package and name.startswith("_")
            new = self._translate(value, 0 if is_private else depth)
            if new is not value:
                self._put(Item(names, name), value, new)

    def _visit(self, slot: Slot, depth: int) -> None:
        old = slot.get()
        new = self._translate(old, depth)
        if new is not old:
            self._put(slot, old, new)

    def _put(self, slot: Slot, old: object, new: object) -> None:
        try:
            slot.set(new)
        except (AttributeError, TypeError) as error:
            logger.warning("%r keeps the %r that torch had before it was patched: %s", slot, old, error)
        else:
            self.changes.append((self._owner, Change(slot, old, slot.get())))

    def _translate(self, value: object, depth: int) -> object:
        """Returns what belongs in the place of `value`, after a look inside it."""
        found = self._replacements.get(id(value))
        if found is not None:
            return found[1]
        kind = type(value)
        if kind in _PLAIN or depth == 0:
            return value
        if kind is staticmethod:
            inner = self._translate(value.__func__, depth - 1)  # type: ignore[attr-defined]
            return value if inner is value.__func__ else staticmethod(inner)  # type: ignore
        if issubclass(kind, tuple):
            return self._translate_tuple(value, depth)  # type: ignore[arg-type]
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            walk = self._walks.get(kind)
            if walk is None:
                walk = self._walks[kind] = self._find_walk(kind)
            owner, self._owner = self._owner, self._find_owner(value)
            walk(value, depth)
            self._owner = owner
        return value

    def _find_owner(self, value: object) -> torch.nn.Module | None:
        """Whom a change inside of a value belongs to; classes and plain functions are the program's."""
        if isinstance(value, torch.nn.Module):
            return value
        is_plain = type(value) is FunctionType and value.__closure__ is None
        return None if is_plain or isinstance(value, type) else self._owner

    def _translate_tuple(self, value: tuple, depth: int) -> object:
        make = tuple if type(value) is tuple else getattr(type(value), "_make", None)
        if make is None or len(value) > _MAX_LENGTH:
            return value
        if all(type(item) in _DATA for item in value):
            return value
        items = [self._translate(item, depth - 1) for item in value]
        return make(items) if any(map(_differ, items, value)) else value

    def _find_walk(self, kind: type) -> Callable[[object, int], None]:
        name = _WALKS.get(kind)
        if name is None and issubclass(kind, type):
            name = "_walk_class"
        if name is None and self._is_of_users(kind):
            name = "_walk_attributes"
        return getattr(self, name or "_pass_over")

    def _pass_over(self, value: object, depth: int) -> None:
        pass

    def _walk_items(self, container: dict | list | deque, depth: int) -> None:
        if len(container) <= _MAX_LENGTH:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            self._visit_items(container, list(items), depth - 1)

    def _visit_items(self, container: object, items: list[tuple[object, object]], depth: int) -> None:
        for key, value in items:
            if type(value) not in _DATA:
                new = self._translate(value, depth)
                if new is not value:
                    self._put(Item(container, key), value, new)

    def _walk_partial(self, partial: functools.partial, depth: int) -> None:
        self._visit(PartialPart(partial, "func"), depth - 1)
        self._visit(PartialPart(partial, "args"), depth - 1)
        self._walk_items(partial.keywords, depth)

    def _walk_function(self, function: FunctionType, depth: int) -> None:
        if not self._modules.is_searched(str(function.__globals__.get("__name__"))):
            # Decorators of others; only what they decorate is looked into, and never exchanged.
            self._translate(function.__dict__.get("__wrapped__"), depth - 1)
            return
        self._visit(Attribute(function, "__defaults__"), depth - 1)
        if function.__kwdefaults__:
            self._walk_items(function.__kwdefaults__, depth)
        for cell in function.__closure__ or ():
            self._visit(Attribute(cell, "cell_contents"), depth - 1)

    def _walk_method(self, method: object, depth: int) -> None:
        self._translate(method.__func__, depth - 1)  # type: ignore[attr-defined]

    def _walk_property(self, method: property, depth: int) -> None:
        for function in (method.fget, method.fset, method.fdel):
            self._translate(function, depth - 1)

    def _walk_class(self, kind: type, depth: int) -> None:
        if not self._is_of_users(kind):
            return
        for name, value in list(vars(kind).items()):
            if type(value) not in _DATA:
                self._visit(Attribute(kind, name), depth - 1)

    def _is_of_users(self, kind: type) -> bool:
        module = kind.__dict__.get("__module__")
        return (
            isinstance(module, str)
            and self._modules.is_searched(module)
            and not issubclass(kind, torch.Tensor)
        )

    def _walk_attributes(self, value: object, depth: int) -> None:
        for name in self._list_slots(type(value)):
            self._visit(Attribute(value, name), depth - 1)
        try:
            names = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        if type(names) is not dict:
            return
        skipped = _OWN_OF_MODULES if isinstance(value, torch.nn.Module) else ()
        self._visit_items(names, [item for item in names.items() if item[0] not in skipped], depth - 1)

    def _list_slots(self, kind: type) -> tuple[str, ...]:
        """The names that a class and its bases have in `__slots__`."""
        if kind not in self._slots:
            items = [item for base in kind.__mro__ for item in vars(base).items()]
            self._slots[kind] = tuple(name for name, item in items if type(item) is MemberDescriptorType)
        return self._slots[kind]


# What is no function and holds none; and what holds none, but may be one.
_DATA = frozenset({str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype})
_PLAIN = _DATA | {ModuleType, BuiltinFunctionType}
_WALKS = {
    dict: "_walk_items",
    OrderedDict: "_walk_items",
    defaultdict: "_walk_items",
    list: "_walk_items",
    deque: "_walk_items",
    functools.partial: "_walk_partial",
    FunctionType: "_walk_function",
    classmethod: "_walk_method",
    property: "_walk_property",
    SimpleNamespace: "_walk_attributes",
}


def _differ(one: object, other: object) -> bool:
    return one is not other
