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

import argparse
import datetime
import enum
import math
import os
import pathlib
import pickle
import sys
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import IO

import numpy as np
import torch

from ampatch.apex.changes import LIBRARIES
from ampatch.apex.drop_in import own_name
from ampatch.levels.private import loadable_globals


class RefusedError(pickle.UnpicklingError):
    """A pickle wants more than data: `wanted` says what."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self.wanted = (*wanted,)
        super().__init__(", ".join(self.wanted))


class Unknown:
    """Stands for what a pickle wants and does not get, so that all of that can be told at once."""


FUNCTIONS = """
    relu gelu silu elu celu selu glu relu6 leaky_relu prelu rrelu mish tanh tanhshrink sigmoid logsigmoid
    softplus softsign softmax log_softmax hardtanh hardsigmoid hardswish
"""
ACTIVATIONS = tuple(FUNCTIONS.split())
# What pickles name functions of torch after, as `getattr(place, "tanh")`.
PLACES = (torch.tanh.__reduce__()[1][0], torch.Tensor.__base__)


def make_dtype(text: str, *_: object) -> np.dtype:
    """Makes what `numpy.dtype` does of a text; a new one, as its byte order may follow."""
    if type(text) is not str:
        raise RefusedError([f"numpy.dtype of {name_of(text)}"])
    return np.dtype(text, False, True)


def fill_dtype(dtype: np.dtype, state: tuple) -> None:
    """Sets the byte order; a state that says more of memory than the name of the type does is refused."""
    *own, order = *dtype.__reduce__()[2][2:], state[1]
    if len(state) != 8 or [*state[2:]] != own or order not in ("<", ">", "|", "="):
        raise RefusedError([f"a numpy.dtype with fields or units, such as {dtype.str}"])
    dtype.__setstate__((3, order, *own))


def make_scalar(dtype: np.dtype, data: bytes | str) -> np.generic:
    """Makes a number of NumPy of its bytes."""
    raw = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(raw, dtype, 1)[0] if raw else dtype.type()  # which refuses objects


def make_array(kind: type, *_: object) -> np.ndarray:
    """Makes an array that is filled later."""
    if kind is not np.ndarray:
        raise RefusedError([f"an array of {name_of(kind)}"])
    return np.empty(0)


def fill_array(array: np.ndarray, state: tuple) -> None:
    """Fills an array that is empty, as a tensor may share the memory of another, with as much as it holds."""
    _, shape, dtype, _, data = state
    size = math.prod(shape)
    is_sized = all(type(each) is int and each >= 0 for each in shape) and array.shape == (0,)
    if dtype == np.dtype(object):
        is_whole = type(data) is list and len(data) == size
    else:
        is_whole = (
            not dtype.hasobject and isinstance(data, (bytes, str)) and len(data) == size * dtype.itemsize
        )
    if not (is_sized and is_whole):
        raise RefusedError([f"a numpy.ndarray of shape {shape} and {dtype} that does not fit its data"])
    array.__setstate__(state)


def array_of_bytes(data: bytes, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def rebuild_tensor(function: object, kind: object, *rest: object) -> torch.Tensor:
    """Makes a tensor with attributes; torch itself would call whatever function it is given."""
    is_torchs = kind in (torch.Tensor, torch.nn.Parameter)
    if not is_torchs or getattr(function, "__module__", "") != "torch._utils":
        raise RefusedError([f"a tensor of {name_of(kind)} that {name_of(function)} makes"])
    return loadable_globals()["torch._tensor._rebuild_from_type_v2"](function, kind, *rest)


def read_function(place: type, name: str) -> Callable:
    """Reads an activation of torch; `getattr` itself would read whatever there is."""
    if place not in PLACES or name not in ACTIVATIONS:
        raise RefusedError([f"builtins.getattr of {name_of(place)}, {name!r}"])
    return getattr(place, name)


def name_of(value: object) -> str:
    """Returns the dotted name of a class or function, or of the class of anything else."""
    kind = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def named(*values: object) -> dict[str, object]:
    return {f"{value.__module__}.{value.__qualname__}": value for value in values}


# Classes whose objects hold data.
HOLDERS = (argparse.Namespace, UserDict, UserList)
CONFIGURATIONS = ("yacs.config.CfgNode", "easydict.EasyDict")  # dicts of libraries, if they are imported
# What is called; none of it does anything but make data.
CALLED = {
    **named(set, frozenset, bytearray, complex, slice, range, OrderedDict, Counter, defaultdict, deque),
    **named(*(getattr(datetime, each) for each in ("date", "datetime", "time", "timedelta", "timezone"))),
    **{
        f"{place}.{each}": getattr(pathlib, each)
        for place in ("pathlib", "pathlib._local")  # as Python 3.13 saves it
        for each in pathlib.__all__
        if each.endswith("Path")
    },
    "types.SimpleNamespace": types.SimpleNamespace,
    "numpy.dtype": make_dtype,
    **{f"numpy.{core}.multiarray.scalar": make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": make_array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": array_of_bytes for core in ("core", "_core")},
    "torch._tensor._rebuild_from_type_v2": rebuild_tensor,
    "builtins.getattr": read_function,
}
# What is only named: as a value, or the factory of a defaultdict.
VALUES = {
    **named(list, dict, tuple, str, int, float, bool, bytes, object, np.ndarray, *HOLDERS),
    **{f"numpy.{kind.__name__}": kind for kind in np.sctypeDict.values()},
    **{
        name: getattr(torch.nn.functional, each)
        for each in ACTIVATIONS
        for name in (f"torch.nn.functional.{each}", f"torch._C._nn.{each.replace('logs', 'log_s')}")
    },
    **named(*PLACES),
}
NETWORKS = ("torch.nn.modules.", "torch.nn.utils.", "torch.nn.parallel.data_parallel.", "torch.optim.")
NETWORKS += ("torch.utils.data.dataset.",)
# Those of apex, whose checkpoints have its own name for them, or ours.
NETWORKS += tuple(
    f"{root}.{part}."
    for root in ("apex", "ampatch.apex")
    for part in ("normalization", "optimizers", "parallel.sync_batchnorm", "parallel.LARC")
)
# Of ours, which a model has while it is initialized: modules, and single classes of others.
HOOKS = ("ampatch.models.", "ampatch.steps.", "ampatch.session.attachments.RefreshWeights")
HOOKS += ("ampatch.watching.post_mortem.LastForward", "ampatch.watching.misuse.half_weights._FirstForward")
TRUSTED = ("builtins", "collections", "enum", "abc", "typing", "argparse", "types")
# Packages whose objects call no methods of others: those of torch.nn do.
DATA = ("builtins", "collections", "torch", "numpy", "pathlib", "datetime")
SPECIAL = ("__new__", "__setstate__", "__del__", "__getattribute__")  # methods that would run
# Types whose `__init__` calls nothing of a class that is derived from them.
FILLED = (defaultdict, dict, deque, list, set)
LOOSE = (list, tuple, deque)  # types that look at nothing that they hold
HOLDING = (list, tuple, set, frozenset, deque)
BUILTINS = (OrderedDict, defaultdict, dict, deque, list, tuple, frozenset, set, str, bytes, int, float)


def script_folder() -> str:
    """Returns the folder that Python finds the script's modules in; with -m that of its package."""
    main = sys.modules["__main__"]
    folder = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "."))
    parent = getattr(getattr(main, "__spec__", None), "parent", "")
    for _ in filter(None, (parent or "").split(".")):
        folder = os.path.dirname(folder)
    return os.path.realpath(folder)


def is_own(module: types.ModuleType) -> bool:
    """Whether a module is a file of the script's folder, and of no library that is installed there."""
    file = os.path.realpath(getattr(module, "__file__", None) or "/")
    libraries = (*LIBRARIES, *map(os.path.realpath, LIBRARIES))
    is_library = file.startswith(libraries) or "-packages" + os.sep in file
    return file.startswith(os.path.join(script_folder(), "")) and not is_library


def find_network(module: str, name: str) -> type | None:
    """Returns a class of torch.nn or torch.optim, or the one here of that name of apex."""
    for place in (module, own_name(module.removeprefix("ampatch."))) if is_network(module) else ():
        kind = vars(sys.modules.get(place, types)).get(name)
        if isinstance(kind, type) and is_network(kind.__module__):
            return kind
    return None


def find_own(module: str, name: str) -> type | None:
    """Returns a class of a module in the script's folder, or of a configuration, if it is imported."""
    place = sys.modules.get(module)
    is_known = place is not None and (is_own(place) or f"{module}.{name}" in CONFIGURATIONS)
    own = vars(place).get(name) if is_known else None
    is_defined = isinstance(own, type) and (own.__module__, own.__qualname__) == (place.__name__, name)
    return own if is_defined else None


def special_method(kind: type) -> str | None:
    """Returns a method of a class that would run if it is made or filled; None if none of its own would."""
    own = [
        base for base in kind.__mro__ if base.__module__ not in TRUSTED and not is_network(base.__module__)
    ]
    # A namedtuple's and an enumeration's `__new__` are Python's, and not called either.
    is_made = isinstance(kind, enum.EnumMeta) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    names = SPECIAL[1:] if is_made else SPECIAL
    return next((name for base in own for name in names if name in vars(base)), None)


def is_network(module: str) -> bool:
    return f"{module}.".startswith(NETWORKS)


def is_hook(kind: type) -> bool:
    """Whether a class is of ours, whose objects keep float32 values of a model, or watch it."""
    return f"{kind.__module__}.{kind.__qualname__}".startswith(HOOKS)


def is_data(value: object) -> bool:
    """Whether no method of the script runs when a value is compared, hashed or looped over."""
    kind = type(value)
    if isinstance(value, (type, enum.Enum, Unknown)) or is_hook(kind):
        return True
    if kind.__module__.partition(".")[0] not in DATA or is_network(kind.__module__):
        return False
    if isinstance(value, dict):
        return all(map(is_data, (*value.keys(), *value.values())))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject or is_data(value.ravel().tolist())
    return not isinstance(value, HOLDING) or all(map(is_data, value))


def builtin_of(kind: type) -> type:
    """Returns the builtin type that a class is derived from, which makes and fills its objects."""
    return next((each for each in BUILTINS if issubclass(kind, each)), object)


# ---- The unpickler ----

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
        hook = vars(sys.modules.get(module, types)).get(name)
        if isinstance(hook, type) and hook.__module__ == module and is_hook(hook):
            self._called.add(id(hook))
            return hook
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

    # ---- Opcodes, each under the name that pickle has for it ----

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def _load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], args)

    def _load_build(self) -> None:
        state = self.stack.pop()
        self._fill(self.stack[-1], state)

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        self._put("__setitem__", items[::2], zip(items[::2], items[1::2], strict=True))

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put("__setitem__", [key], [(key, value)])

    def _load_appends(self) -> None:
        self._put("extend", [], [(self.pop_mark(),)])

    def _load_append(self) -> None:
        self._put("extend", [], [([self.stack.pop()],)])

    def _load_additems(self) -> None:
        items = self.pop_mark()
        self._put("add", items, [(item,) for item in items])

    def _load_frozenset(self) -> None:
        items = self.pop_mark()  # which puts another stack in place
        self.append(self._call(frozenset, (items,)))

    def _load_binpersid(self) -> None:
        """Finds the memory of a tensor; of a module that is saved with its source only the class is taken."""
        kind, *rest = self.stack.pop()
        if kind in ("module", b"module"):
            self.append(rest[0])
        elif kind in ("storage", b"storage"):
            self.append(self.persistent_load((kind, *rest)))
        else:
            self.append(self._refuse(f"a persistent {kind!r}"))

    def _load_refused(self) -> None:
        raise RefusedError(["opcodes that run what they name"])


Unpickler.dispatch = dict.fromkeys(range(256), Unpickler._load_refused)
for _opcode in OPCODES.split():
    _code = getattr(pickle, _opcode)[0]
    _plain = pickle._Unpickler.dispatch[_code]
    Unpickler.dispatch[_code] = getattr(Unpickler, f"_{_plain.__name__}", _plain)


def load(file: IO[bytes], **options: object) -> object:
    return Unpickler(file, **options).load()
