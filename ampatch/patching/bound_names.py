"""Other names of torch's functions, and whatever refers to one, wherever scripts and libraries have it."""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import CellType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType

import torch
from torch.nn import Module

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
        self._overriders: weakref.WeakSet[type] = weakref.WeakSet()  # what has overridden functions since
        self._loaded = 0  # modules, at that time

    def add(self, original: object, wrapper: Function) -> None:
        """Notes what stands for a function now; of several wrappers the latest counts."""
        self._wrappers[id(original)] = original, wrapper
        self._originals[wrapper] = original

    def replace_in(self, models: Sequence[Module], *, in_modules: bool) -> Callable[[], None]:
        """Replaces bound functions in models and, if asked, in loaded modules; returns the undo."""
        self._models = [model for model in self._models if model() is not None]
        before = len(self._models)
        self._models += [weakref.ref(part) for model in models for part in model.modules()]
        _exchange(self._list_wrappers(), self._models[before:], in_modules=in_modules)
        if in_modules:
            self._counts = _count_references(self.list_wrappers())
        return functools.partial(self._forget, before)

    def replace_everywhere(self) -> None:
        """Replaces bound functions once more, for a wrapper that was added late."""
        _exchange(self._list_wrappers(), self._models)

    def close(self) -> None:
        """Puts the originals back, also where a wrapper was bound since.

        The garbage collector is asked, which takes its time, only for wrappers that are held elsewhere.
        """
        _exchange(self._list_originals(), self._models)
        for table in (self._models, self._wrappers, self._counts, self._overriders):
            table.clear()
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
        if self._overriders.issuperset(kinds) and self._loaded == len(sys.modules):
            return
        self._overriders.update(kinds)
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
            self.replace_everywhere()

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
        self._visited: dict[int, object] = {}  # models and classes; kept, so that no id is used again
        self._is_searched = functools.cache(_is_searched)  # of the name of a module

    def search_modules(self) -> None:
        """Looks through the names of loaded modules: of the user's, and of packages that use torch."""
        modules = list(sys.modules.items())
        torch_ids = {id(module) for path, module in modules if path.partition(".")[0] == "torch"}
        torch_ids.update(self._replacements)
        for path, module in modules:
            if _is_left_alone(path) or not issubclass(type(module), ModuleType):
                continue
            names = _read_globals(module)
            is_package = _is_installed(names) and path != "__main__"
            if is_package and torch_ids.isdisjoint(map(id, list(names.values()))):
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
        if id(model) in self._visited:
            return
        self._visited[id(model)] = model
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
        if id(kind) in self._visited or not self._is_searched(str(kind.__dict__.get("__module__"))):
            return
        self._visited[id(kind)] = kind
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
    file = str(names.get("__file__"))
    return "site-packages" in file or "dist-packages" in file


Replacements = Mapping[int, tuple[object, object]]  # id of what is looked for: itself, what takes its place

_CACHE = "_lru_cache_wrapper"  # what `functools.lru_cache` makes of a function, by the name of its type


class References:
    """Finds what refers to objects, whatever it is, and has it refer to others as well, or in their place.

    What cannot be changed, such as a tuple, is made once more, and takes its own place in turn. The variables
    of functions that run stay as they are, and so do objects of C code with no attribute for what they hold.
    """

    def __init__(self, replacements: Replacements, ours: Iterable[object] = ()) -> None:
        self._replacements = dict(replacements)
        self._own = set(map(id, [*self._replacements.values(), *ours]))  # what is not looked into

    def exchange(self) -> None:
        """Replaces what is held, as a key too, and clears caches of `functools` whose calls were given it."""
        pending = [old for old, _ in self._replacements.values()]
        while pending:
            holders = self._find_holders(pending)
            owners = _find_owners([holder for holder in holders if isinstance(holder, dict)])
            pending = [holder for holder in holders if self._exchange_in(holder, owners.get(id(holder)))]

    def add_keys(self) -> None:
        """Has dictionaries and sets find under the new objects what they have under the old ones."""
        pending = [old for old, _ in self._replacements.values()]
        while pending:
            pending = [holder for holder in self._find_holders(pending) if self._add_to(holder)]

    def _find_holders(self, objects: Sequence[object]) -> list[object]:
        own = {*self._own, id(objects)}
        return [
            holder
            for holder in _get_referrers(objects)
            if id(holder) not in own and not type(holder).__module__.startswith("ampatch.")
        ]

    def _find(self, value: object) -> object:
        pair = self._replacements.get(id(value))
        return value if pair is None else pair[1]

    def _replace(self, old: object, new: object) -> bool:
        """Has an object replaced in what holds it, which is to be found."""
        self._replacements[id(old)] = pair = (old, new)
        self._own.add(id(pair))
        return True

    def _exchange_in(self, holder: object, owner: object) -> bool:
        """Replaces what an object holds; returns whether it has to be replaced itself."""
        kind = type(holder)  # a proxy says that it is of another
        with suppress(AttributeError, TypeError):  # C does not let everything be written
            if issubclass(kind, (tuple, frozenset)):
                return self._make_again(holder)
            if kind is MethodType:
                return self._replace(holder, MethodType(self._find(holder.__func__), holder.__self__))
            if kind.__name__ == _CACHE:
                holder.cache_clear()
            elif issubclass(kind, dict):
                self._exchange_items(holder, owner)
            elif issubclass(kind, (list, deque)):
                base = list if issubclass(kind, list) else deque
                for index in [index for index, value in enumerate(holder) if id(value) in self._replacements]:
                    base.__setitem__(holder, index, self._find(holder[index]))
            elif issubclass(kind, set):
                for value in [value for value in holder if id(value) in self._replacements]:
                    set.discard(holder, value)
                    set.add(holder, self._find(value))
            elif kind is not FrameType:
                self._exchange_attributes(holder)
        return False

    def _exchange_items(self, items: dict, owner: object) -> None:
        if type(owner).__name__ == _CACHE:  # its answers were about the old objects
            owner.cache_clear()
            return
        kind = OrderedDict if isinstance(items, OrderedDict) else dict
        held = list(kind.items(items))
        if any(id(key) in self._replacements for key, _ in held):
            kind.clear(items)  # what follows keeps the order
            for key, value in held:
                kind.__setitem__(items, self._find(key), self._find(value))
            return
        for key, value in held:
            if id(value) in self._replacements and isinstance(owner, type):
                type.__setattr__(owner, key, self._find(value))  # past what a metaclass may refuse
            elif id(value) in self._replacements:
                kind.__setitem__(items, key, self._find(value))

    def _make_again(self, holder: tuple | frozenset) -> bool:
        kind = tuple if isinstance(holder, tuple) else frozenset
        return self._replace(holder, kind.__new__(type(holder), map(self._find, holder)))

    def _exchange_attributes(self, holder: object) -> None:
        if isinstance(holder, functools.partial):
            args = self._find(holder.args)
            holder.__setstate__((self._find(holder.func), args, holder.keywords, vars(holder)))
        elif isinstance(holder, CellType):
            holder.cell_contents = self._find(holder.cell_contents)
        elif isinstance(holder, FunctionType):
            holder.__defaults__ = self._find(holder.__defaults__)
        elif isinstance(holder, staticmethod):
            staticmethod.__init__(holder, self._find(holder.__func__))
        elif isinstance(holder, classmethod):
            classmethod.__init__(holder, self._find(holder.__func__))
        elif isinstance(holder, property):
            functions = map(self._find, (holder.fget, holder.fset, holder.fdel))
            property.__init__(holder, *functions, holder.__doc__)
        else:
            self._exchange_slots(holder)

    def _exchange_slots(self, holder: object) -> None:
        members = [member for kind in type(holder).__mro__ for member in vars(kind).values()]
        for member in [member for member in members if type(member) is MemberDescriptorType]:
            with suppress(AttributeError, TypeError):  # it is empty, or C lets nobody write it
                value = member.__get__(holder)
                if id(value) in self._replacements:
                    member.__set__(holder, self._find(value))
        names = object.__getattribute__(holder, "__dict__")  # which Python may not have made yet
        if type(names) is dict:
            self._exchange_items(names, None)

    def _add_to(self, holder: object) -> bool:
        """Adds keys to what finds the old ones; returns whether an object may be a key that holds one."""
        kinds = (OrderedDict, dict, set, frozenset, tuple)
        kind = next((kind for kind in kinds if issubclass(type(holder), kind)), None)
        with suppress(TypeError):  # C may not let it be made again
            if kind is tuple:
                return self._make_again(holder)
        for old, new in list(self._replacements.values()) if kind else ():
            with suppress(TypeError):  # a tuple that holds a list is no key
                if kind.__contains__(holder, old):
                    self._add_key(kind, holder, old, new)
        return False

    @staticmethod
    def _add_key(kind: type, table: object, old: object, new: object) -> None:
        if kind is set:
            set.add(table, new)
        elif kind is frozenset:
            larger = frozenset.__new__(type(table), [*table, new])
            References({id(table): (table, larger)}).exchange()
        elif not kind.__contains__(table, new):
            kind.__setitem__(table, new, kind.__getitem__(table, old))


def _get_referrers(objects: Sequence[object]) -> list[object]:
    """What refers to some objects, but for the tuple of this very question, which Python 3.13 returns too."""
    question = tuple(objects)
    return [holder for holder in gc.get_referrers(*question) if holder is not question]


def _find_owners(dicts: Sequence[dict]) -> dict[int, object]:
    """The classes and caches that some dictionaries belong to, by their ids."""
    asked = [
        names for names in dicts if "__module__" in names or any(isinstance(key, tuple) for key in names)
    ]
    owners = {}
    for owner in _get_referrers(asked) if asked else ():
        if isinstance(owner, type) or type(owner).__name__ == _CACHE:
            owners |= {id(names): owner for names in gc.get_referents(owner) if isinstance(names, dict)}
    return owners
