"""Casts the tensors in a tree of arguments, whose containers keep their type."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor

from ampatch.levels.precision import CONVERT, ELIGIBLE

SIMPLE = (type(None), int, float, bool, str, slice, type(...))  # of arguments that hold no tensor

TensorCast = Callable[[Tensor], Tensor]
Other = Callable[[object], object] | None


def cast_to(dtype: torch.dtype) -> TensorCast:
    """Returns a function that casts an eligible tensor to `dtype` and leaves others as they are.

    For one tree: the same tensor has the same cast there. Attention that is called with one tensor as query,
    key and value asks whether they are the same.
    """
    sources = ELIGIBLE - {dtype}
    convert = CONVERT.get(dtype) or (lambda tensor: tensor.to(dtype))
    casts: dict[Tensor, Tensor] = {}  # hashed and compared by identity

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in sources:
            return tensor
        if tensor not in casts:
            casts[tensor] = convert(tensor)
        return casts[tensor]

    return cast


def cast_tree(value: object, cast: TensorCast, other: Other = None, around: tuple = ()) -> object:
    """Casts the tensors in a tree of containers; what holds none is returned as it is.

    Sequences, mappings, namedtuples and dataclasses keep their type. Strings, numbers, arrays and
    unknown objects stay, unless `other` says what to do with an unknown object. `around` are the
    containers that hold this one: one that holds itself is met again inside, and stays there as it is.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (str, bytes, range, type, torch.nn.Module)):
        return value
    if around and any(_is_one(value, outer) for outer in around):
        return value
    if isinstance(value, (tuple, list, deque)):
        return _cast_sequence(value, cast, other, around)
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast, other, around)
    if dataclasses.is_dataclass(value):
        return _cast_fields(value, cast, other, around)
    return value if other is None else other(value)


def cast_listed(value: object, cast: TensorCast) -> object:
    """Casts what torch's own functions take: a tensor, or a list or a tuple of some.

    Most lists and tuples hold numbers, such as the stride of a convolution, and that is seen quickly.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if not may_hold_tensors(value):
        return value
    if type(value) is list and not any(isinstance(item, (list, tuple)) for item in value):
        return [cast(item) if isinstance(item, Tensor) else item for item in value]
    return cast_tree(value, cast)


def may_hold_tensors(value: object) -> bool:
    """Whether a list or a tuple has a tensor among its items, or another list or tuple."""
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (Tensor, list, tuple)):
                return True
    return False


def have_one_dtype(args: tuple) -> bool:
    """Whether a quick look shows that arguments have no two dtypes of ours: there is nothing to cast."""
    first = None
    for arg in args:
        if isinstance(arg, Tensor):
            dtype = arg.dtype
            if dtype is first or dtype not in ELIGIBLE:
                continue
            if first is not None:
                return False
            first = dtype
        elif type(arg) not in SIMPLE and (not isinstance(arg, (list, tuple)) or may_hold_tensors(arg)):
            return False
    return True


def cast_batch(value: object, dtype: torch.dtype) -> object:
    """Casts a tree as `cast_tree` does, and calls `.to(dtype)` of unknown objects that have one.

    Published scripts hand batches of their own classes to the model and rely on that call.
    """
    return cast_tree(value, cast_to(dtype), cast_object(dtype))


def cast_object(dtype: torch.dtype) -> Callable[[object], object]:
    """Returns a function that calls `.to(dtype)` of objects that have one.

    Graphs of torch_geometric take a device alone there; their `.apply` takes a function, and changes them.
    """

    def cast(item: object) -> object:
        if not callable(getattr(item, "to", None)):
            return item
        try:
            return item.to(dtype)  # type: ignore[attr-defined]
        except TypeError:
            has_apply = callable(getattr(item, "apply", None))
            return copy.copy(item).apply(cast_to(dtype)) if has_apply else item  # type: ignore[attr-defined]

    return cast


def cast_call(args: tuple, kwargs: dict | None, dtype: torch.dtype, other: Other = None) -> tuple:
    """Casts what a forward hook was given, and returns what the hook is to; kwargs may be left out.

    An argument that is given twice is the same again.
    """
    cast = cast_to(dtype)
    args = tuple([cast_tree(arg, cast, other) for arg in args])
    if kwargs is None:
        return args
    return args, {name: cast_tree(arg, cast, other) for name, arg in kwargs.items()}


def _is_one(value: object, other: object) -> bool:
    """Whether two values are the same object. Dynamo cannot tell of containers: there they never are."""
    if torch.compiler.is_dynamo_compiling() and isinstance(other, (tuple, list, deque, Mapping)):
        return False
    return value is other


def _cast_sequence(value: tuple | list | deque, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    items = [cast_tree(item, cast, other, around) for item in value]
    if all(_is_one(new, old) for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        return items
    if hasattr(value, "_make"):
        return type(value)._make(items)  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return type(value)(items)
    result = copy.copy(value)
    for index, item in enumerate(items):
        result[index] = item
    return result


def _cast_mapping(value: Mapping, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    items = {key: cast_tree(item, cast, other, around) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if not _is_one(item, value[key])}
    if not changed:
        return value
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _cast_fields(value: object, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    names = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
    old = {name: getattr(value, name) for name in names if hasattr(value, name)}
    items = {name: cast_tree(item, cast, other, around) for name, item in old.items()}
    changed = {name: item for name, item in items.items() if not _is_one(item, old[name])}
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # a frozen dataclass refuses setattr
    return result
