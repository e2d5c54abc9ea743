"""Notes that the user wants the sweep to end, so that it can end in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stop:
    """Says whether a signal came; a second one interrupts whatever is done about the first."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    @property
    def name(self) -> str:
        return "Ctrl-C" if self.signal == signal.SIGINT else "" if self.signal is None else self.signal.name

    @property
    def status(self) -> int:
        """Returns the exit status that a shell gives to a process which the signal ended, 0 without one."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def noting_signals() -> Iterator[Stop]:
    """Takes the signals that would end this process while the block runs; those that are ignored stay so."""
    stop = Stop()
    with ExitStack() as stack:
        for number in SIGNALS:
            before = signal.getsignal(number)
            # Python allows handlers in the main thread alone.
            if before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
                signal.signal(number, stop)
                stack.callback(signal.signal, number, before)
        yield stop
