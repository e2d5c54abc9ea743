"""Has functions of torch take what they took in earlier years."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampatch.apex.legacy.finding import ROWS
from ampatch.apex.legacy.mending.names import Notices
from ampatch.apex.legacy.pattern_rows import PART

# Which argument is a mask, and what a keyword calls it.
MASKS = MappingProxyType(
    {
        **dict.fromkeys((Tensor.masked_fill, Tensor.masked_fill_, Tensor.masked_select), (1, "mask")),
        **dict.fromkeys((Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_select), (1, "mask")),
        **{torch.where: (0, "condition"), Tensor.where: (1, "condition")},
        **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), (1, "index")),
    }
)
SPLITS = (Tensor.chunk, Tensor.split, torch.chunk, torch.split)
IN_PLACE = (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_)
WITH_BOOLS = MappingProxyType(
    {
        **dict.fromkeys((Tensor.__rsub__, Tensor.__sub__, Tensor.sub, torch.sub), "1 - mask"),
        **dict.fromkeys((Tensor.neg, torch.neg), "-mask"),
    }
)
# These take complex numbers as pairs, and give them so.
STFT, ISTFT = (torch.functional.stft, Tensor.stft), (torch.functional.istft, Tensor.istft)


class LegacyMode(TorchFunctionMode):
    """Has functions of torch take what they took, in the thread that enters it."""

    def __init__(self, notices: Notices) -> None:
        super().__init__()
        self._notices = notices

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        """Calls a function of torch; an argument that it no longer takes is changed first."""
        given = kwargs or {}
        if func is Tensor.__getitem__ and is_first_of_none(*args):
            self._notices.tell(ROWS["loss.data[0]"])
            return args[0] if args[0].requires_grad else args[0].item()
        if func in WITH_BOOLS and any(map(is_bool, args)):
            self._notices.tell(ROWS[WITH_BOOLS[func]])
            args = tuple(each.byte() if is_bool(each) else each for each in args)
        if func in MASKS:
            args, given = self._with_masks(*MASKS[func], args, given)
        if func in SPLITS and args:
            return split_apart(func(*args, **given), *args, **given)
        if func in IN_PLACE and hasattr(args[0], PART):
            self._notices.tell(ROWS[PART])
        if func is Tensor.view and not args[0].is_contiguous():
            return self._view(*args, **given)
        if func in STFT and given.get("return_complex") is None and not args[0].is_complex():
            self._notices.tell(ROWS["torch.stft(...)"])
            return torch.view_as_real(func(*args, **{**given, "return_complex": True}))
        if func in ISTFT and args and not args[0].is_complex():
            self._notices.tell(ROWS["torch.stft(...)"])
            args = (torch.view_as_complex(args[0].contiguous()), *args[1:])
        return func(*args, **given)

    def _with_masks(self, place: int, name: str, args: tuple, given: Mapping) -> tuple[tuple, Mapping]:
        """Returns arguments with a mask in the place of one of bytes, or of several in an index."""
        mask = args[place] if place < len(args) else given.get(name)
        if not any(map(is_byte, parts_of(mask))):
            return args, given
        self._notices.tell(ROWS["masked_fill(x.byte(), ...)"])
        masks = tuple(each.bool() if is_byte(each) else each for each in parts_of(mask))
        mask = masks if isinstance(mask, tuple) else masks[0]
        if place < len(args):
            return (*args[:place], mask, *args[place + 1 :]), given
        return args, {**given, name: mask}

    def _view(self, tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Returns a view, or a copy of that shape where there can be none."""
        try:
            return tensor.view(*args, **kwargs)
        except RuntimeError:
            copied = tensor.reshape(*args, **kwargs)
        self._notices.tell(ROWS["correct[:k].view(-1)"])
        return copied


def is_first_of_none(tensor: Tensor, index: object) -> bool:
    """Whether the first element is taken of a tensor that is one number."""
    return tensor.dim() == 0 and index == 0 and isinstance(index, int) and not isinstance(index, bool)


def is_bool(value: object) -> bool:
    """Whether a value is a mask, with which torch does not compute."""
    return isinstance(value, Tensor) and value.dtype is torch.bool


def is_byte(value: object) -> bool:
    """Whether a value is a mask of bytes."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8


def parts_of(index: object) -> tuple:
    """Returns the index of each dimension."""
    return index if isinstance(index, tuple) else (index,)


def split_apart(parts: tuple[Tensor, ...], tensor: Tensor, *args: object, **kwargs: object) -> tuple:
    """Returns the same views of a tensor, made one by one, as autograd lets only those change in place."""
    dim = kwargs.get("dim", args[1] if args[1:] else 0)
    starts = itertools.accumulate((part.size(dim) for part in parts), initial=0)
    views = tuple(
        tensor.narrow(dim, start, part.size(dim)) for start, part in zip(starts, parts, strict=False)
    )
    for view in views:
        setattr(view, PART, True)
    return views


def init_at_port(init: Callable, notices: Notices, /, *args: object, **kwargs: object) -> None:
    """Has ranks meet at the port that 16 bits hold of a number above 65535."""
    port = os.environ.get("MASTER_PORT", "")
    if port.isdigit() and int(port) >= 2**16:
        notices.tell(ROWS["MASTER_PORT=80000"])
        os.environ["MASTER_PORT"] = str(int(port) % 2**16)
    init(*args, **kwargs)
