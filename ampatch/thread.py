"""What one thread is doing, and so whether it casts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch


@dataclass(frozen=True, slots=True)
class Forward:
    """A running forward of an initialized model, or of a part of one that runs in float32."""

    owner: int  # id of the module
    off: bool  # casts are off in it
    dtype: torch.dtype | None  # what its weights and activations have; None where ops are cast one by one
    frame: FrameType  # the call that runs it


class ThreadState(threading.local):
    """What one thread is doing: it casts while `off` is 0, as every thread does at first.

    A forward or a step that ends in an exception may not say so: hooks after a step do not run then,
    and those after a forward only for an Exception, which KeyboardInterrupt is not. So it counts only
    while the call that began it is on the thread's stack.
    """

    off = 0  # what follows, added up: the one thing that a patched function looks at

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self._disabled = 0
        self._step: FrameType | None = None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turns casts off in this thread; nests, and survives exceptions."""
        self._disabled += 1
        self.off += 1
        try:
            yield
        finally:
            self._disabled -= 1
            self.off -= 1

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Turns casts on, whatever turned them off."""
        self._forget_ended()
        around = self.off
        self.off -= around
        try:
            yield
        finally:
            self.off += around

    def is_off(self) -> bool:
        """Whether casts are off; asked by a patched function that finds `off` above 0."""
        if not self._disabled and not torch.compiler.is_dynamo_compiling():
            self._forget_ended()
        return self.off > 0

    def begin_step(self, frame: FrameType) -> None:
        """Turns casts off for the length of an optimizer's step."""
        self.end_step()
        self._step = frame
        self.off += 1

    def end_step(self) -> FrameType | None:
        """Turns casts on again after a step, and returns the call that ran it."""
        frame, self._step = self._step, None
        self.off -= frame is not None
        return frame

    def push(self, forward: Forward) -> None:
        """Notes that a forward begins."""
        self._forget_ended()
        self.forwards.append(forward)
        self.off += forward.off

    def pop(self, owner: int) -> None:
        """Notes that a module's forward ended, and with it those inside."""
        if any(forward.owner == owner for forward in self.forwards):
            while self._drop_innermost().owner != owner:
                pass

    def reset(self) -> None:
        """Forgets all forwards and the step."""
        self.end_step()
        while self.forwards:
            self._drop_innermost()

    def _drop_innermost(self) -> Forward:
        forward = self.forwards.pop()
        self.off -= forward.off
        return forward

    def _forget_ended(self) -> None:
        """Drops what is not on the stack any more.

        A forward is pushed only onto running ones, so that those around a running one run as well.
        """
        if self._step is not None and not is_running(self._step):
            self.end_step()
        while self.forwards and not is_running(self.forwards[-1].frame):
            self._drop_innermost()


def is_running(frame: FrameType) -> bool:
    """Whether a call is on this thread's stack."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame
