"""Notices what is written to weights without a trace: through `.data`, NumPy or DLPack."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.cast import CASTS
from ampatch.levels.patcher import Patcher, SessionPatch, get_raw
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import Line, find_line

MOST_HALVED = 4096


class WatchedView:
    """Stands in for what shows the memory of a tensor to others, and forgets the casts of it.

    No function, so that Dynamo does not take it for a wrapper that casts.
    """

    def __init__(self, original: Callable[..., object]) -> None:
        self._original = original
        functools.update_wrapper(self, original)

    def __get__(self, tensor: Tensor | None, kind: type | None = None) -> object:
        return self if tensor is None else MethodType(self, tensor)

    def __call__(self, tensor: Tensor, *args: object, **kwargs: object) -> object:
        view = self._original(tensor, *args, **kwargs)
        CASTS.forget_memory(tensor)
        return view


class Watched(Protocol):
    """A half weight and its master."""

    half: Tensor

    def settle(self, asked: Tensor) -> None:
        """Called before one of them, `asked` for its `.data`, may be written."""


class DataWatch(SessionPatch):
    """Watches `.data` while a session depends on weights that it copied.

    Who asks for `.data` may write: a cached cast is forgotten, and the parameter noted in `touched` if
    it is in `watched` (half weights and their masters, by id), so that the two are compared before they are
    used. Idioms such as `p.data.clamp_(-c, c)` work. An array of NumPy or a DLPack capsule ends the cast as
    well. So does `swap_tensors`, which has the graph of an earlier cast raise. What CUDA graphs write is for
    `Captures` to see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: WeakValueDictionary[int, Watched] = WeakValueDictionary()
        self.touched: set[int] = set()
        self.halved: dict[int, Line] = {}  # float32 tensors that were made half, by id, and by which line
        self.views: dict[int, deque[Tensor]] = {}  # what `.data` gave of tensors, by id, where somebody asks

    def patch(self, patcher: Patcher) -> None:
        """Puts a property on Tensor, and replaces the functions."""
        original = get_raw(Tensor, "data")

        def read(tensor: Tensor) -> Tensor:
            self._expect_write(tensor)
            data = original.__get__(tensor)
            if self.views and id(tensor) in self.views:
                self.views[id(tensor)].append(data)
            return data

        def write(tensor: Tensor, value: Tensor) -> None:
            self._expect_write(tensor)
            if isinstance(value, Tensor) and value.dtype in HALF_TYPES and tensor.dtype is torch.float32:
                self._record_halved(tensor)
            original.__set__(tensor, value)

        patcher.replace(Tensor, "data", property(read, write, doc=original.__doc__))
        for owner, name in (
            (Tensor, "numpy"),
            (Tensor, "__dlpack__"),
            (torch, "to_dlpack"),
            (torch.utils.dlpack, "to_dlpack"),
        ):
            patcher.replace(owner, name, WatchedView(get_raw(owner, name)))
        swap = torch.utils.swap_tensors

        @functools.wraps(swap)
        def swap_tensors(t1: Tensor, t2: Tensor) -> None:
            CASTS.forget(t1)
            CASTS.forget(t2)
            swap(t1, t2)

        patcher.replace(torch.utils, "swap_tensors", swap_tensors)

    def _expect_write(self, tensor: Tensor) -> None:
        if isinstance(tensor, Parameter):
            CASTS.forget(tensor)
        else:
            CASTS.forget_memory(tensor)
        weight = self.watched.get(id(tensor))
        if weight is not None:
            weight.settle(tensor)

    def _record_halved(self, tensor: Tensor) -> None:
        if len(self.halved) >= MOST_HALVED:  # copies that a script makes to save, say
            self.halved.clear()
        self.halved[id(tensor)] = find_line()

    def keep_watching(self, params: set[int]) -> None:
        """Drops the ids of parameters that are gone."""
        for key in set(self.watched) - params:
            del self.watched[key]
        self.touched &= params

    def forget(self) -> None:
        self.views.clear()
        self.watched.clear()
        self.touched.clear()
        self.halved.clear()
