"""Has functions of torch take what they took in earlier years."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ampatch.apex.legacy import rows
from ampatch.apex.legacy.names import Notices

# Which argument is a mask, and what a keyword calls it.
MASKS = {
    **dict.fromkeys((Tensor.masked_fill, Tensor.masked_fill_, Tensor.masked_select), (1, "mask")),
    **dict.fromkeys((Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_select), (1, "mask")),
    **dict.fromkeys((torch.masked_fill, torch.masked_scatter), (1, "mask")),
    **dict.fromkeys((Tensor.index_put, Tensor.index_put_), (1, "indices")),
    **dict.fromkeys((torch.index_put, torch.index_put_), (1, "indices")),
    **{torch.where: (0, "condition"), Tensor.where: (1, "condition")},
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), (1, "index")),
}
SPLITS = (Tensor.chunk, Tensor.split, torch.chunk, torch.split)
IS_PART = "_is_part_of_split"
IN_PLACE = (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_)
WITH_BOOLS = {
    **dict.fromkeys((Tensor.__rsub__, Tensor.__sub__, Tensor.sub, torch.sub), rows.FROM_ONE),
    **dict.fromkeys((Tensor.neg, torch.neg), rows.NEGATED),
}
# These take complex numbers as pairs, and give them so.
STFT, ISTFT = (torch.functional.stft, Tensor.stft), (torch.functional.istft, Tensor.istft)
# What limits in place, where float limits of integers were cut.
CLAMPS = (Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_, Tensor.clip_, torch.clamp_, torch.clip_)
CLAMPS += (torch.clamp_min_, torch.clamp_max_)
# Losses whose labels have to be floats; losses of other kinds take integers, too.
BINARY = (functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits)
BINARY += (torch.binary_cross_entropy_with_logits,)
INTEGRAL = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
CHANGED = frozenset(
    {*MASKS, *SPLITS, *IN_PLACE, *WITH_BOOLS, *STFT, *ISTFT, *CLAMPS, *BINARY}
    | {Tensor.__getitem__, Tensor.__invert__, Tensor.view}
)


class LegacyMode(TorchFunctionMode):
    """Has functions of torch take what they took, in the thread that enters it."""

    def __init__(self, notices: Notices) -> None:
        super().__init__()
        self._notices = notices

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        """Calls a function of torch; an argument that it no longer takes is changed first."""
        named = kwargs or {}
        original = original_of(func)
        if original is Tensor.__getitem__ and is_first_of_none(*args):
            self._notices.warn(rows.NUMBER)
            return args[0] if args[0].requires_grad else args[0].item()
        if original in WITH_BOOLS and any(map(is_bool, args)):
            self._notices.warn(WITH_BOOLS[original])
            args = tuple(each.byte() if is_bool(each) else each for each in args)
        if original is Tensor.__invert__ and is_byte(*args) and not (args[0] > 1).any():
            self._notices.warn(rows.INVERTED)  # a mask, as pictures have other bytes
            return 1 - args[0]
        if original in MASKS:
            args, named = self._with_masks(*MASKS[original], args, named)
        if original is Tensor.__setitem__ and is_written_leaf(*args):
            self._notices.warn(rows.LEAF)
            with torch.no_grad():
                return func(*args, **named)
        if original in SPLITS and args:
            return split_apart(func(*args, **named), *args, **named)
        if original in IN_PLACE and hasattr(args[0], IS_PART):
            self._notices.warn(rows.PART)
        if original in CLAMPS and args and is_integral(args[0]):
            args, named = self._with_whole_limits(args, named)
        if original in BINARY:
            args, named = self._with_float_labels(args, named)
        if original is Tensor.view and not args[0].is_contiguous():
            return self._view(*args, **named)
        if original in STFT and named.get("return_complex") is None and not args[0].is_complex():
            self._notices.warn(rows.STFT)
            return torch.view_as_real(func(*args, **{**named, "return_complex": True}))
        if original in ISTFT and args and not args[0].is_complex():
            self._notices.warn(rows.STFT)
            args = (torch.view_as_complex(args[0].contiguous()), *args[1:])
        return func(*args, **named)

    def _with_masks(self, place: int, name: str, args: tuple, kwargs: Mapping) -> tuple[tuple, Mapping]:
        """Returns arguments with a mask in the place of one of bytes, or of several in an index."""
        mask = argument(args, kwargs, place, name)
        if not any(map(is_byte, parts_of(mask))):
            return args, kwargs
        self._notices.warn(rows.MASK)
        masks = tuple(each.bool() if is_byte(each) else each for each in parts_of(mask))
        return replaced(args, kwargs, place, name, masks if isinstance(mask, tuple) else masks[0])

    def _with_float_labels(self, args: tuple, kwargs: Mapping) -> tuple[tuple, Mapping]:
        """Returns arguments of a loss with float labels, where torch.full made integers of them."""
        labels = argument(args, kwargs, 1, "target")
        if not is_integral(labels):
            return args, kwargs
        self._notices.warn(rows.LABELS)
        return replaced(args, kwargs, 1, "target", labels.float())

    def _with_whole_limits(self, args: tuple, kwargs: Mapping) -> tuple[tuple, Mapping]:
        """Returns arguments with integers in the place of float limits, which torch used to cut."""
        integers = args[0]

        def cut(limit: object) -> object:
            if isinstance(limit, Tensor):
                return limit.to(integers.dtype) if limit.is_floating_point() else limit
            return int(limit) if isinstance(limit, (float, np.floating)) and math.isfinite(limit) else limit

        limits, named = tuple(map(cut, args[1:])), {name: cut(limit) for name, limit in kwargs.items()}
        before, after = (*args[1:], *kwargs.values()), (*limits, *named.values())
        if any(old is not new for old, new in zip(before, after, strict=True)):
            self._notices.warn(rows.CLAMP)
        return (integers, *limits), named

    def _view(self, tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Returns a view, or a copy of that shape where there can be none."""
        try:
            return tensor.view(*args, **kwargs)
        except RuntimeError:
            copied = tensor.reshape(*args, **kwargs)
        self._notices.warn(rows.VIEW)
        return copied


def original_of(func: Callable) -> Callable:
    """Returns the function of torch that is changed here, for what a session has put in its place."""
    while func not in CHANGED and hasattr(func, "__wrapped__"):
        func = func.__wrapped__
    return func


def argument(args: tuple, kwargs: Mapping, place: int, name: str) -> object:
    """Returns the argument that has this place, or this name."""
    return args[place] if place < len(args) else kwargs.get(name)


def replaced(args: tuple, kwargs: Mapping, place: int, name: str, value: object) -> tuple[tuple, Mapping]:
    """Returns the arguments with another value for one of them."""
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def is_integral(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in INTEGRAL


def is_first_of_none(tensor: Tensor, index: object) -> bool:
    """Whether the first element is taken of a tensor that is one number."""
    return tensor.dim() == 0 and index == 0 and isinstance(index, int) and not isinstance(index, bool)


def is_written_leaf(tensor: Tensor, index: object, value: object) -> bool:
    """Whether a parameter is written into, in a line that no gradient flows through."""
    is_plain = not (isinstance(value, Tensor) and value.requires_grad)
    return is_plain and tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()


def is_bool(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool


def is_byte(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.uint8


def parts_of(index: object) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def split_apart(parts: tuple[Tensor, ...], tensor: Tensor, *args: object, **kwargs: object) -> tuple:
    """Returns the same views of a tensor, made one by one, as autograd lets only those change in place."""
    dim = kwargs.get("dim", args[1] if args[1:] else 0)
    starts = itertools.accumulate((part.size(dim) for part in parts), initial=0)
    views = tuple(
        tensor.narrow(dim, start, part.size(dim)) for start, part in zip(starts, parts, strict=False)
    )
    for view in views:
        setattr(view, IS_PART, True)
    return views


def take_byte_mask(
    check: Callable, notices: Notices, /, mask: Tensor | None, *args: object, **kwargs: object
) -> object:
    """Has attention, and modules that have it, take masks of bytes."""
    if is_byte(mask):
        notices.warn(rows.MASK)
        mask = mask.bool()
    types = {torch.uint8: torch.bool}  # that of another mask, which is to be the same
    return check(mask, *args, **{name: types.get(value, value) for name, value in kwargs.items()})


def init_at_port(init: Callable, notices: Notices, /, *args: object, **kwargs: object) -> None:
    """Has ranks meet at the port that 16 bits hold of a number above 65535."""
    port = os.environ.get("MASTER_PORT", "")
    if port.isdigit() and int(port) >= 2**16:
        notices.warn(rows.PORT)
        os.environ["MASTER_PORT"] = str(int(port) % 2**16)
    init(*args, **kwargs)
