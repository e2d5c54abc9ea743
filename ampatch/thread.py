"""What one thread is doing, and so whether it casts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Frame:
    """A running forward of an initialized model, or of a part of one that runs in float32."""

    owner: int  # id of the module
    off: bool  # casts are off in it
    dtype: torch.dtype | None  # what its weights and activations have; None where ops are cast one by one


class ThreadState(threading.local):
    """What one thread is doing: it casts while `off` is 0, as every thread does at first."""

    off = 0
    stepping = False

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turns casts off in this thread; nests, and survives exceptions."""
        self.off += 1
        try:
            yield
        finally:
            self.off -= 1

    def begin_step(self) -> None:
        """Turns casts off for the length of an optimizer's step."""
        if not self.stepping:
            self.stepping = True
            self.off += 1

    def end_step(self) -> None:
        """Turns casts on again after a step, also after one that raised and so told nobody."""
        if self.stepping:
            self.stepping = False
            self.off -= 1

    def push(self, frame: Frame) -> None:
        """Notes that a forward begins."""
        self._unwind(frame.owner)  # it cannot run inside itself: an interrupt hid its end from us
        self.frames.append(frame)
        self.off += frame.off

    def pop(self, owner: int) -> None:
        """Notes that a forward ended."""
        self._unwind(owner)

    def _unwind(self, owner: int) -> None:
        """Drops the frame of a module and those inside it, if it has one."""
        owners = [frame.owner for frame in self.frames]
        if owner in owners:
            self._drop(owners.index(owner))

    def _drop(self, start: int) -> None:
        self.off -= sum(frame.off for frame in self.frames[start:])
        del self.frames[start:]

    def reset(self) -> None:
        """Forgets forwards and steps that an interrupt ended; called where none can be running."""
        self.end_step()
        self._drop(0)
