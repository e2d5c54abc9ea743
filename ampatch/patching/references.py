"""Everything that refers to a function, found by Python's garbage collector, and what takes its place."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import CellType, FrameType, FunctionType, MemberDescriptorType, MethodType

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
    given = tuple(objects)
    return [holder for holder in gc.get_referrers(*given) if holder is not given]


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
