"""Reads pickles of checkpoints and arrays without running what they choose; torch.load takes it for `pickle`.

torch's own weights-only unpickler comes first, and is not enough for files of earlier years and for
numpy.load: it reads no protocol 4, fills no defaultdict, deque or subclass of dict, and calls a class that
it is told to allow, with arguments out of the file. What a pickle can do, and what is done here:

- It names things (GLOBAL). It gets what torch's list and the tables below have, modules of torch.nn, and
  classes that a module of the script's folder defines: no functions, no names with a dot, nothing that a
  module only imported. Nothing is imported for it.
- It calls them (REDUCE). Only what makes data is called, with data: no class of the script, and nothing that
  is given an object of one, as Python would call its methods.
- It makes objects (NEWOBJ) and fills them (BUILD, SETITEMS, APPENDS). The methods of the builtin type below
  do that, not those of the script's class; a class that would need its own `__new__`, `__setstate__` or
  `__del__` is refused.
- Opcodes that do more than that are not read.

What is loaded is data all the same: a script that calls a method of it calls it with what the file says.
"""

from __future__ import annotations

import enum
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterable
from typing import IO

import numpy as np
import torch

from ampatch.apex.legacy.mending.trusted import (
    CALLED,
    FILLED,
    HOLDERS,
    LOOSE,
    VALUES,
    RefusedError,
    Unknown,
    builtin_of,
    fill_array,
    fill_dtype,
    find_network,
    find_own,
    is_data,
    name_of,
    special_method,
)
from ampatch.levels.private import loadable_globals

# The opcodes of protocol 2 and later, but for those that make what they name at once.
OPCODES = """
    PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE
    NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINSTRING SHORT_BINSTRING
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_TUPLE
    TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT EMPTY_SET FROZENSET GLOBAL STACK_GLOBAL REDUCE
    NEWOBJ BUILD APPEND APPENDS SETITEM SETITEMS ADDITEMS BINPERSID
"""


class Unpickler(pickle._Unpickler):  # the one in Python: that in C lets nobody choose what it calls
    """Reads one pickle; `wanted` collects what it does not get."""

    def __init__(self, file: IO[bytes], **options: object) -> None:
        super().__init__(file, **options)
        self.wanted: dict[str, None] = {}
        self._of_torch = loadable_globals()
        self._called = {id(each) for each in (*self._of_torch.values(), *CALLED.values())}
        self._made: set[type] = {*HOLDERS}

    def load(self) -> object:
        """Returns what the file holds; raises RefusedError if it wants more than data."""
        try:
            value = super().load()
        except RefusedError as error:
            self.wanted.update(dict.fromkeys(error.wanted))
        except Exception:
            if not self.wanted:  # else it comes of what stands for that
                raise
        if self.wanted:
            raise RefusedError(self.wanted)
        return value

    def find_class(self, module: str, name: str) -> object:
        """Returns what a name stands for."""
        if self.proto < 3:  # names of Python 2
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        for table in (CALLED, VALUES, self._of_torch):
            if path in table:
                return table[path]
        kind = None if "." in name else find_network(module, name) or find_own(module, name)
        if kind is None:
            return self._refuse(path)
        special = special_method(kind)
        if special is not None:
            return self._refuse(f"{path} with its {special}")
        self._made.add(kind)
        return kind

    def _refuse(self, what: str) -> Unknown:
        self.wanted[what] = None
        return Unknown()

    def _call(self, function: object, args: tuple) -> object:
        if any(isinstance(each, Unknown) for each in (function, *args)):
            return Unknown()
        if id(function) in self._called and is_data(args):
            return function(*args)
        if function in self._made and is_data(args):
            base = builtin_of(function)
            if isinstance(function, enum.EnumMeta):
                return function._value2member_map_[args[0]]
            if base in FILLED or (
                base is OrderedDict and not args
            ):  # which would put items by the class's method
                value = base.__new__(function, *args)
                base.__init__(value, *args)
                return value
        return self._refuse(f"a call of {name_of(function)}")

    def _make(self, kind: type, args: tuple) -> object:
        if isinstance(kind, Unknown):
            return kind
        base = builtin_of(kind)
        is_safe = base in LOOSE or is_data(args)
        if kind in self._made and is_safe and not isinstance(kind, enum.EnumMeta):
            return base.__new__(kind, args) if hasattr(kind, "_fields") else base.__new__(kind, *args)
        if id(kind) in self._called and is_data(args):
            return torch.nn.Parameter(*args) if kind is torch.nn.Parameter else kind.__new__(kind, *args)
        return self._refuse(f"an object of {name_of(kind)}")

    def _fill(self, value: object, state: object) -> None:
        kind = type(value)
        if Unknown in (kind, type(state)):
            return
        if isinstance(value, np.dtype):
            fill_dtype(value, state)
        elif kind is np.ndarray:
            fill_array(value, state)
        elif kind is torch.Tensor:  # of torch 0.3
            value.set_(*state)
        elif id(kind) not in self._called and kind not in self._made:
            self._refuse(f"a state of {name_of(kind)}")
        elif hasattr(kind, "__setstate__"):
            value.__setstate__(dict(dict.items(state)) if isinstance(state, dict) else state)
        elif isinstance(state, dict):
            vars(value).update(dict.items(state))  # whatever methods a class that is derived from dict has
        elif state:
            self._refuse(f"slots of {name_of(kind)}")

    def _put(self, method: str, keys: list, calls: Iterable[tuple]) -> None:
        """Calls a method of the builtin type below on what is on the stack, if that takes such items."""
        target = self.stack[-1]
        kind, base = type(target), builtin_of(type(target))
        if kind is Unknown:
            return
        is_ours = kind in self._made or kind.__module__ in ("builtins", "collections")
        if not is_ours or not hasattr(base, method) or not is_data(keys):
            self._refuse(f"items of {name_of(kind)}")
            return
        for arguments in calls:
            getattr(base, method)(target, *arguments)

    def load_reduce(self) -> None:
        """Calls what is on the stack."""
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj(self) -> None:
        """Makes an object."""
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args)

    def load_build(self) -> None:
        """Fills an object."""
        state = self.stack.pop()
        self._fill(self.stack[-1], state)

    def load_setitems(self) -> None:
        """Fills a dict."""
        items = self.pop_mark()
        self._put("__setitem__", items[::2], zip(items[::2], items[1::2], strict=True))

    def load_setitem(self) -> None:
        """Puts one item into a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._put("__setitem__", [key], [(key, value)])

    def load_appends(self) -> None:
        """Fills a list."""
        items = self.pop_mark()
        self._put("extend", [], [(items,)])

    def load_append(self) -> None:
        """Puts one item into a list."""
        item = self.stack.pop()
        self._put("extend", [], [([item],)])

    def load_additems(self) -> None:
        """Fills a set."""
        items = self.pop_mark()
        self._put("add", items, [(item,) for item in items])

    def load_frozenset(self) -> None:
        """Makes a frozenset."""
        items = self.pop_mark()
        self.append(self._call(frozenset, (items,)))

    def load_binpersid(self) -> None:
        """Finds the memory of a tensor; of a module that is saved with its source only the class is taken."""
        kind, *rest = self.stack.pop()
        if kind in ("module", b"module"):
            self.append(rest[0])
        elif kind in ("storage", b"storage"):
            self.append(self.persistent_load((kind, *rest)))
        else:
            self.append(self._refuse(f"a persistent {kind!r}"))

    def load_refused(self) -> None:
        raise RefusedError(["opcodes that run what they name"])


# By opcode, as the class that is derived from has it.
Unpickler.dispatch = dict.fromkeys(range(256), Unpickler.load_refused) | {
    code: getattr(Unpickler, pickle._Unpickler.dispatch[code].__name__)
    for code in (getattr(pickle, name)[0] for name in OPCODES.split())
}


def load(file: IO[bytes], **options: object) -> object:
    """Reads one pickle out of a file, as `pickle.load` does."""
    return Unpickler(file, **options).load()
