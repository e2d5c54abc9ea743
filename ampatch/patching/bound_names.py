"""Other names of torch's functions, by which scripts and libraries bound them before or after the patch."""

from __future__ import annotations

import functools
import sys
import sysconfig
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType

import torch
from torch.nn import Module

from ampatch.patching.references import References, Replacements

Function = Callable[..., object]
Models = Iterable[weakref.ref[Module]]

# Torch, and packages that patch it, need the functions that they keep: to work, or to undo.
_LEFT_ALONE = frozenset({"ampatch", "functorch", "torch", "torchgen", "triton", "wrapt"})
# The one part of torch that calls functions with rows by names of its own, all of them global (2.6 to 2.15).
_SEARCHED_IN_TORCH = "torch.distributions."
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_DICTIONARIES = frozenset({dict, OrderedDict, defaultdict})
_DATA = frozenset({str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, ModuleType})
_MAX_DEPTH = 2  # a dictionary of dictionaries, as configurations are
_MAX_LENGTH = 10_000  # a longer container is data, not a choice of functions


class BoundNames:
    """Has names such as those of `from torch.nn.functional import softmax` follow the patches.

    The undo searches again, for the wrappers: no place is remembered, so that a script may change or drop
    what holds a function meanwhile.
    """

    def __init__(self) -> None:
        # Wrappers of closed sessions too: a model that was made while torch was patched may hold one.
        self._originals: weakref.WeakKeyDictionary[Function, object] = weakref.WeakKeyDictionary()
        self._wrappers: dict[int, tuple[object, Function]] = {}
        self._models: list[weakref.ref[Module]] = []  # and their parts, which may be taken out of them
        self._counts: dict[int, int] = {}  # how many refer to each wrapper, when tables were looked for
        self._seen: weakref.WeakSet[type] = weakref.WeakSet()  # what has overridden functions since
        self._loaded = 0  # modules, at that time

    def add(self, original: object, wrapper: Function) -> None:
        """Notes what stands for a function now; of several wrappers the latest counts."""
        self._wrappers[id(original)] = original, wrapper
        self._originals[wrapper] = original

    def follow(self, models: Sequence[Module], *, in_modules: bool) -> Callable[[], None]:
        """Replaces bound functions in models and, if asked, in loaded modules; returns the undo."""
        self._models = [model for model in self._models if model() is not None]
        before = len(self._models)
        self._models += [weakref.ref(part) for model in models for part in model.modules()]
        _exchange(self._list_wrappers(), self._models[before:], in_modules=in_modules)
        if in_modules:
            self._counts = _count_references(self.list_wrappers())
        return functools.partial(self._forget, before)

    def follow_everywhere(self) -> None:
        """Replaces bound functions once more, for a wrapper that was added late."""
        _exchange(self._list_wrappers(), self._models)

    def close(self) -> None:
        """Puts the originals back, also where a wrapper was bound since.

        The garbage collector is asked, which takes its time, only for wrappers that are held elsewhere.
        """
        _exchange(self._list_originals(), self._models)
        for kept in (self._models, self._wrappers, self._counts, self._seen):
            kept.clear()
        self._loaded = 0
        pairs = self.list_wrappers()
        counts, (free,) = _count_references(pairs), _count_references([(lambda: None, None)]).values()
        held = {id(pair[0]): pair for pair in pairs if counts[id(pair[0])] > free}
        if held:
            References(held).exchange()

    def list_wrappers(self) -> list[tuple[Function, object]]:
        return list(self._originals.items())

    def look_for_tables(self, kinds: set[type], original: object) -> None:
        """Has tables with wrappers as keys find the originals, which torch is about to hand over.

        A library that was imported while torch is patched has such tables. They are looked for when one of
        `kinds` overrides a function for the first time, or after modules were loaded, and only where
        more refer to a wrapper than before: one more to that of `original`, which is being called.
        """
        if self._seen.issuperset(kinds) and self._loaded == len(sys.modules):
            return
        self._seen.update(kinds)
        self._loaded = len(sys.modules)
        pairs = self.list_wrappers()
        counts = _count_references(pairs)
        held = {
            id(pair[0]): pair
            for pair in pairs
            if counts[id(pair[0])] - (pair[1] is original) > self._counts.get(id(pair[0]), 0)
        }
        if held:
            References(held, self._wrappers.values()).add_keys()
        self._counts = counts

    def _forget(self, before: int) -> None:
        """Puts the originals back in all models but the first ones."""
        dropped, self._models = self._models[before:], self._models[:before]
        _exchange(self._list_originals(), dropped, in_modules=False)
        if self._models:  # which may share a part or a dictionary with those
            self.follow_everywhere()

    def _list_wrappers(self) -> Replacements:
        """What takes the place of originals, and of earlier wrappers of them."""
        known = [(old, self._wrappers.get(id(original))) for old, original in self.list_wrappers()]
        return self._wrappers | {id(old): (old, latest[1]) for old, latest in known if latest is not None}

    def _list_originals(self) -> Replacements:
        return {id(wrapper): (wrapper, original) for wrapper, original in self.list_wrappers()}


class Search:
    """Replaces functions by others where scripts keep them: in modules, their classes and models.

    It looks into the dictionaries, lists and `functools.partial`s there, and at default arguments. Only
    identity counts: nothing is called, compared or asked for attributes that are computed.
    """

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._seen: dict[int, object] = {}  # models and classes; kept, so that no id is used again
        self._is_searched = functools.cache(_is_searched)  # of the name of a module

    def search_modules(self) -> None:
        """Looks through the names of loaded modules: of the user's, and of packages that use torch."""
        modules = list(sys.modules.items())
        of_torch = {id(module) for path, module in modules if path.partition(".")[0] == "torch"}
        of_torch.update(self._replacements)
        for path, module in modules:
            if _is_left_alone(path) or not issubclass(type(module), ModuleType):
                continue
            names = _read_globals(module)
            is_package = _is_installed(names) and path != "__main__"
            if is_package and of_torch.isdisjoint(map(id, list(names.values()))):
                continue  # asked first: it is quick, and true of most
            if self._is_searched(path):
                depth = 0 if path.startswith(_SEARCHED_IN_TORCH) else _MAX_DEPTH
                self._search_globals(names, is_package, depth)

    def _search_globals(self, names: dict[str, object], is_package: bool, depth: int) -> None:
        # Under a private name of a package only a function that it imports is looked at, and nothing inside.
        for name, value in list(names.items()):
            new = self._exchange(value, 0 if is_package and name.startswith("_") else depth)
            if new is not value:
                names[name] = new

    def search_model(self, model: Module) -> None:
        """Looks through what a model, its parts and their classes keep."""
        if id(model) in self._seen:
            return
        self._seen[id(model)] = model
        names = object.__getattribute__(model, "__dict__")
        self._search_items(names, names.items(), _MAX_DEPTH)
        for kind in type(model).__mro__:
            self._search_class(kind)

    def _exchange(self, value: object, depth: int) -> object:
        """Returns what belongs in the place of `value`, after a look inside it."""
        pair = self._replacements.get(id(value))
        if pair is not None:
            return pair[1]
        kind = type(value)
        if depth == 0 or kind in _DATA:
            return value
        if kind in _DICTIONARIES:
            self._search_items(value, value.items(), depth - 1)  # type: ignore[attr-defined]
        elif kind is list:
            self._search_items(value, enumerate(value), depth - 1)  # type: ignore[call-overload]
        elif kind is functools.partial:
            self._search_partial(value, depth - 1)  # type: ignore[arg-type]
        elif kind is FunctionType:
            self._search_defaults(value)  # type: ignore[arg-type]
        elif issubclass(kind, type):
            self._search_class(value)  # type: ignore[arg-type]
        elif issubclass(kind, Module):
            self.search_model(value)  # type: ignore[arg-type]
        return value

    def _search_items(self, container: object, items: Iterable, depth: int) -> None:
        if len(container) <= _MAX_LENGTH:  # type: ignore[arg-type]
            for key, value in list(items):
                new = self._exchange(value, depth)
                if new is not value:
                    container[key] = new  # type: ignore[index]

    def _search_partial(self, partial: functools.partial, depth: int) -> None:
        function = self._exchange(partial.func, depth)
        if function is not partial.func:  # in the same object, which others may hold
            partial.__setstate__((function, partial.args, partial.keywords, vars(partial)))
        self._search_items(partial.keywords, partial.keywords.items(), depth)

    def _search_defaults(self, function: FunctionType) -> None:
        if not (function.__defaults__ or function.__kwdefaults__):
            return
        if not self._is_searched(str(function.__globals__.get("__name__"))):
            return
        defaults = function.__defaults__ or ()
        if not self._replacements.keys().isdisjoint(map(id, defaults)):
            function.__defaults__ = tuple(self._exchange(default, 0) for default in defaults)
        by_name = function.__kwdefaults__ or {}
        self._search_items(by_name, by_name.items(), 0)

    def _search_class(self, kind: type) -> None:
        if id(kind) in self._seen or not self._is_searched(str(kind.__dict__.get("__module__"))):
            return
        self._seen[id(kind)] = kind
        for name, value in list(vars(kind).items()):
            new = self._exchange_attribute(value)
            if new is not value:
                type.__setattr__(kind, name, new)  # past what a metaclass may refuse

    def _exchange_attribute(self, value: object) -> object:
        """Returns what belongs in the place of a class's attribute."""
        function = value.__func__ if isinstance(value, staticmethod) else value
        new = self._exchange(function, _MAX_DEPTH)
        if new is function:
            return value
        if isinstance(value, _Static):
            return value.previous if value.stands_for(new) else _Static(new, value.previous)
        # A builtin has no __get__: it is not bound to instances, and its wrapper must not be.
        is_static = isinstance(value, staticmethod) or not hasattr(function, "__get__")
        return _Static(new, value) if is_static else new


class _Static(staticmethod):
    """A wrapper as a static method, which remembers the attribute of a class that it took the place of."""

    def __init__(self, function: object, previous: object) -> None:
        super().__init__(function)  # type: ignore[arg-type]
        self.previous = previous

    def stands_for(self, original: object) -> bool:
        """Whether that attribute was a function, or a static method of it."""
        return original is self.previous or original is getattr(self.previous, "__func__", None)


def _count_references(pairs: list[tuple[object, object]]) -> dict[int, int]:
    """How many references there are to the first of each pair, by its id."""
    return {id(pair[0]): sys.getrefcount(pair[0]) for pair in pairs}


def _exchange(replacements: Replacements, models: Models, in_modules: bool = True) -> None:
    search = Search(replacements)
    if in_modules:
        search.search_modules()
    for model in [reference() for reference in models]:
        if model is not None:  # an empty container of modules is false
            search.search_model(model)


def _is_searched(path: str) -> bool:
    """Whether what a module defines is looked into, by its name: not what Python and torch define."""
    if _is_left_alone(path) or path in sys.builtin_module_names:  # such as sys, which keeps all modules
        return False
    module = sys.modules.get(path)
    names = _read_globals(module) if issubclass(type(module), ModuleType) else {}  # type: ignore[arg-type]
    return _is_installed(names) or not str(names.get("__file__")).startswith(_STANDARD_LIBRARY)


def _is_left_alone(path: str) -> bool:
    return path.partition(".")[0] in _LEFT_ALONE and not path.startswith(_SEARCHED_IN_TORCH)


def _read_globals(module: ModuleType) -> dict[str, object]:
    """Returns the names of a module, past the `__getattribute__` that loads one that is lazy."""
    return ModuleType.__getattribute__(module, "__dict__")


def _is_installed(names: Mapping[str, object]) -> bool:
    """Whether these are the names of a module of an installed package."""
    file = str(names.get("__file__"))
    return "site-packages" in file or "dist-packages" in file
