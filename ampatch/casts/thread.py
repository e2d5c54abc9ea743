"""What one thread is doing, and so whether it casts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor

from ampatch.levels.private import change_in_graph, find_in_thread, is_in_thread, keep_in_thread
from ampatch.levels.stack import is_running

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """What a module returned, rounded for the modules around it."""

    half: Tensor
    version: int | None  # of the half tensor; None where torch does not count, or a graph cannot ask
    precise: Tensor
    owner: int  # id of the module


@dataclass(slots=True, eq=False)
class OpenForward:
    """A running forward of an initialized model, or of a part of one that runs in float32.

    Not frozen: that takes longer to make, and each forward makes one.
    """

    owner: int  # id of the module
    off: bool  # casts are off in it
    dtype: torch.dtype | None  # what its weights and activations have; None where ops are cast one by one
    frame: FrameType | None  # the call that runs it; None in a graph, where none ends early
    rounded: list[Rounded] = field(default_factory=list)  # between the modules in it


class ThreadState(threading.local):
    """What one thread is doing: it casts while `off` is 0, as every thread does at first.

    A forward or a step that ends in an exception may not say so: torch runs no hooks after such a step,
    and those after a forward for an Exception alone, which KeyboardInterrupt is not. So it counts only
    while the call that began it is on the thread's stack.

    On CUDA, and deep inside of nested ones, the autograd engine runs a backward in a thread of its own. It
    casts as the thread that waits for it, whose state torch hands on (`_stash_obj_in_tls`).
    """

    def __init__(self) -> None:
        self._key = f"ampatch.thread {id(self)}"
        # `off` adds up all reasons below: patched functions look at it alone. `_asks` is the part of it that
        # only says to ask the thread that called backward. Both are set here: before torch 2.12 Dynamo saw
        # only the default of the class, had it one.
        self.off = self._asks = int(not _is_pythons())
        if not self._asks:
            keep_in_thread(self._key, self.__dict__)
        self.forwards: tuple[OpenForward, ...] = ()  # the innermost is the last
        self.disabled_by = 0  # blocks and calls that turn casts off
        self._step: FrameType | None = None
        self._autocasts: list[tuple[object, bool]] = []  # blocks of torch.autocast, and if they disable us

    def disabled(self) -> AbstractContextManager[None]:
        """Returns a block in which casts are off in this thread; nests, and survives exceptions."""
        return _Disabled(self)

    def disable(self, change: int) -> None:
        """Turns casts off once more (1), or once less (-1)."""
        self.disabled_by += change
        self.off += change

    def enter_autocast(self, block: object, disables: bool) -> None:
        """Notes that a block of `torch.autocast` begins, which may turn our casts off."""
        self._autocasts.append((block, disables))
        self.disable(disables)

    def exit_autocast(self, block: object) -> None:
        """Notes that a block of `torch.autocast` ends; one that began before the session is not on record."""
        for index in reversed(range(len(self._autocasts))):  # those of generators may cross
            if self._autocasts[index][0] is block:
                self.disable(-self._autocasts.pop(index)[1])
                return

    def enabled(self) -> AbstractContextManager[None]:
        """Returns a block in which casts are on, whatever turned them off."""
        return _Enabled(self)

    def is_off(self) -> bool:
        """Whether casts are off; asked by a patched function that finds `off` above 0."""
        if torch.compiler.is_dynamo_compiling():
            return self.off > self._asks
        if not self.disabled_by:
            self.forget_ended()
        return self.off > self._asks or (self._asks > 0 and self._is_caller_off())

    def _is_caller_off(self) -> bool:
        """Whether casts are off in the thread that waits for the backward that this one runs."""
        if not is_in_thread(self._key):
            return False
        caller = find_in_thread(self._key)
        return caller["off"] > caller["_asks"]

    def begin_step(self, frame: FrameType) -> None:
        """Turns casts off for the length of an optimizer's step; of two, the outer one counts."""
        if self._step is None:
            self._step, self.off = frame, self.off + 1
        elif not is_running(self._step):
            self._step = frame

    def end_step(self, frame: FrameType) -> None:
        if self._step is frame:
            self._step, self.off = None, self.off - 1

    def call_closure(self, closure: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Calls a closure inside of a step, with casts as they were before the step."""
        step = self._step
        self._set_step(None)
        try:
            return closure(*args, **kwargs)
        finally:
            self._set_step(step)

    def _set_step(self, frame: FrameType | None) -> None:
        self.off += (frame is not None) - (self._step is not None)
        self._step = frame

    def push(self, forward: OpenForward) -> None:
        """Notes that a forward begins."""
        if forward.frame is None:
            _change(self._push, forward)
            return
        if self.forwards or self._step is not None:
            self.forget_ended()
        self._push(forward)

    def _push(self, forward: OpenForward) -> None:
        self.forwards = (*self.forwards, forward)
        self.off += int(forward.off)  # Dynamo 2.6 adds no truth value to a number

    def pop(self, owner: int) -> None:
        """Notes that a module's forward ended, and with it those inside."""
        forwards = self.forwards
        if not forwards:
            return
        if forwards[-1].owner == owner and not torch.compiler.is_dynamo_compiling():  # as nearly always
            self.forwards = forwards[:-1]
            self.off -= forwards[-1].off
        elif any(forward.owner == owner for forward in forwards):
            while _change(self._drop_innermost).owner != owner:
                pass

    def reset(self) -> None:
        """Forgets all forwards, the step and blocks of `torch.autocast`."""
        self._set_step(None)
        while self._autocasts:
            self.exit_autocast(self._autocasts[-1][0])
        while self.forwards:
            self._drop_innermost()

    def _drop_innermost(self) -> OpenForward:
        forward = self.forwards[-1]
        self.forwards = self.forwards[:-1]
        self.off -= int(forward.off)
        return forward

    def forget_ended(self) -> bool:
        """Drops what is not on the stack any more; returns whether a forward was dropped.

        A forward is pushed only onto running ones, so that those around a running one run as well.
        """
        if self._step is not None and not is_running(self._step):
            self._set_step(None)
        before = self.forwards
        while self.forwards and not is_running(self.forwards[-1].frame):
            self._drop_innermost()
        return self.forwards is not before


# Classes, because Dynamo traces no generators before torch 2.7.


class _Disabled(ContextDecorator):
    """A block in which casts are off in one thread."""

    def __init__(self, thread: ThreadState) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        _change(self._thread.disable, 1)

    def __exit__(self, *_: object) -> None:
        _change(self._thread.disable, -1)


class _Enabled:
    """A block in which casts are on in one thread."""

    def __init__(self, thread: ThreadState) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        thread = self._thread
        thread.forget_ended()
        self._around = thread.off, thread._asks
        thread.off = thread._asks = 0

    def __exit__(self, *_: object) -> None:
        off, self._thread._asks = self._around
        self._thread.off += off


def _change(function: Callable[..., Result], *args: object) -> Result:
    """Calls what changes the state; in a part of a graph, too, such as a checkpoint's.

    Dynamo refuses changes there that outlast the part. These do not: each comes with its undo.
    """
    if torch.compiler.is_dynamo_compiling():
        return change_in_graph(function, *args)
    return function(*args)


def _is_pythons() -> bool:
    """Whether Python started this thread; the autograd engine starts its own."""
    here, unknown = threading.get_ident(), threading._DummyThread  # type: ignore[attr-defined]
    return any(one.ident == here and not isinstance(one, unknown) for one in threading.enumerate())
