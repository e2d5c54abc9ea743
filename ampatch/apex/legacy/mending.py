"""Gives a script of earlier years what it expects: what `ampatch run --legacy` sets up, and undoes."""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader

import numpy as np
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Sampler

from ampatch.apex.changes import Changes, wrap
from ampatch.apex.legacy.finding import KEYWORD, ROWS
from ampatch.apex.legacy.names import Told, put_back_names, tell
from ampatch.apex.legacy.table import ASYNC, LOAD, PART

MASKED = (Tensor.masked_fill, Tensor.masked_fill_, Tensor.masked_select, torch.masked_select)
SPLITS = (Tensor.chunk, Tensor.split, torch.chunk, torch.split)
IN_PLACE = (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_)


class LegacyMode(TorchFunctionMode):
    """Has functions of torch take what they took, in the thread that enters it."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        """Calls a function of torch; an argument that it no longer takes is changed first."""
        given = kwargs or {}
        if func is Tensor.__getitem__ and is_first_of_none(*args):
            self._told.tell(ROWS["loss.data[0]"])
            return args[0] if args[0].requires_grad else args[0].item()
        if func in (Tensor.__rsub__, Tensor.__sub__, Tensor.sub) and any(map(is_bool, args)):
            self._told.tell(ROWS["1 - mask"])
            args = tuple(each.byte() if is_bool(each) else each for each in args)
        if func in MASKED and any(map(is_byte, args)):
            args = self._with_masks(args)
        if func is Tensor.__setitem__ and any(map(is_byte, parts_of(args[1]))):
            args = (args[0], self._with_masks(parts_of(args[1])), args[2])
        if func in SPLITS and args:
            return split_apart(func(*args, **given), *args, **given)
        if func in IN_PLACE and hasattr(args[0], PART):
            self._told.tell(ROWS[PART])
        if func is Tensor.view and not args[0].is_contiguous():
            return self._view(*args, **given)
        return func(*args, **given)

    def _with_masks(self, values: tuple) -> tuple:
        """Returns values with masks in the place of those of bytes."""
        self._told.tell(ROWS["masked_fill(x.byte(), ...)"])
        return tuple(each.bool() if is_byte(each) else each for each in values)

    def _view(self, tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Returns a view, or a copy of that shape where there can be none."""
        try:
            return tensor.view(*args, **kwargs)
        except RuntimeError:
            copied = tensor.reshape(*args, **kwargs)
        self._told.tell(ROWS["correct[:k].view(-1)"])
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


def load_all(load: Callable, told: Told, /, f: object, *args: object, **kwargs: object) -> object:
    """Has `torch.load` load objects as well, where a script says nothing of it."""
    place = f.tell() if hasattr(f, "tell") else 0
    try:
        return load(f, *args, **kwargs)
    except pickle.UnpicklingError:
        if kwargs.get("weights_only") is not None:
            raise
    told.tell(ROWS[LOAD])
    if hasattr(f, "seek"):
        f.seek(place)
    return load(f, *args, **kwargs | {"weights_only": False})


def init_silently(init: Callable, told: Told, /, self: object, *args: object, **kwargs: object) -> None:
    """Has a scheduler take `verbose`, and be silent."""
    if "verbose" in kwargs:
        told.tell(ROWS["lr_scheduler(verbose=)"])
        del kwargs["verbose"]
    init(self, *args, **kwargs)


def init_sampler(init: Callable, told: Told, /, self: object, data_source: object = None) -> None:
    """Has a sampler take what it is to draw from, with which it never did anything."""
    if data_source is not None:
        told.tell(ROWS["Sampler.__init__(data)"])


def init_with_floats(
    init: Callable,
    told: Told,
    /,
    self: object,
    params: object,
    lr: object = 1e-3,
    betas: tuple = (0.9, 0.999),
    *args: object,
    **kwargs: object,
) -> None:
    """Has Adam and AdamW take a 0 among their betas."""
    if any(isinstance(each, int) for each in betas):
        told.tell(ROWS["Adam(betas=(0, 0.9))"])
        betas = tuple(map(float, betas))
    init(self, params, lr, betas, *args, **kwargs)


def add_argument(
    add: Callable, told: Told, /, self: object, *names: str, **options: object
) -> argparse.Action:
    """Has the option --local_rank be what today's launchers say it is."""
    if "--local_rank" in names and "--local-rank" not in names:
        told.tell(ROWS["--local_rank"])
        names += ("--local-rank",)
        options["default"] = os.environ.get("LOCAL_RANK", options.get("default"))
    return add(self, *names, **options)


def read_bytes(
    fromstring: Callable,
    told: Told,
    /,
    string: object,
    dtype: object = float,
    count: int = -1,
    *,
    sep: str = "",
    **like: object,
) -> object:
    """Has `numpy.fromstring` read bytes, too."""
    if sep:
        return fromstring(string, dtype, count, sep=sep, **like)
    told.tell(ROWS["numpy.fromstring(bytes)"])
    return np.frombuffer(string, dtype, count).copy()


def equal_to_tensors(told: Told) -> Callable:
    """Returns the `==` of the class Variable, which is torch.Tensor to it."""

    def equals(cls: type, other: object) -> bool:
        if other is not Tensor:
            return cls is other
        told.tell(ROWS["type(x) == Variable"])
        return True

    return equals


def mend_source(source: bytes) -> bytes:
    """Returns a source that Python parses, if it says `async=` where that was an argument's name.

    >>> mend_source(b"x.cuda(async=True)"), mend_source(b"'async=' in text")
    (b'x.cuda(non_blocking=True)', b"'async=' in text")
    """
    try:
        compile(source, "<script>", "exec", dont_inherit=True)
    except SyntaxError:
        return KEYWORD.sub(b"non_blocking", source)
    return source


def compile_mended(
    source_to_code: Callable, told: Told, /, self: object, data: object, path: object, **options: object
) -> object:
    """Has the modules of a script compiled with their sources mended."""
    mended = mend_source(data) if isinstance(data, bytes) else data
    if mended is not data:
        told.tell(ROWS[ASYNC], os.path.relpath(os.fsdecode(path)))
    return source_to_code(self, mended, path, **options)


@contextmanager
def legacy() -> Iterator[None]:
    """Puts back what torch, NumPy, Python and Pillow have taken away while the context is open.

    The log has a warning for each thing, when a script says it for the first time.
    """
    told = Told()
    with Changes() as changes, LegacyMode(told):
        put_back_names(changes, told)
        changes.set_attribute(torch, "load", wrap(torch.load, load_all, told))
        changes.set_attribute(np, "fromstring", wrap(np.fromstring, read_bytes, told))
        # Made with a generator of its own, since to make one draws a number.
        iterator = type(iter(DataLoader([0], generator=torch.Generator()))).__base__
        changes.set_attribute(iterator, "next", wrap(iterator.__next__, tell, told, ROWS["iterator.next()"]))
        changes.set_attribute(type(torch.autograd.Variable), "__eq__", equal_to_tensors(told))
        parser = argparse._ActionsContainer
        changes.set_attribute(parser, "add_argument", wrap(parser.add_argument, add_argument, told))
        for kind in [each for each in vars(lr_scheduler).values() if isinstance(each, type)]:
            if issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
                changes.set_attribute(kind, "__init__", wrap(kind.__init__, init_silently, told))
        if "__init__" not in vars(Sampler):
            changes.set_attribute(Sampler, "__init__", wrap(Sampler.__init__, init_sampler, told))
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            changes.set_attribute(kind, "__init__", wrap(kind.__init__, init_with_floats, told))
        loader = SourceFileLoader
        changes.set_attribute(loader, "source_to_code", wrap(loader.source_to_code, compile_mended, told))
        changes.set_attribute(sys, "dont_write_bytecode", True)  # else what is mended would stay on the disk
        yield
