"""Starts a child process in a group of its own, waits for it, and makes sure that all of the group ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

START = str(Path(__file__).with_name("start.py"))
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0


@contextmanager
def child_process(
    command: Sequence[str],
    path: Path,
    seed: int = 0,
    grace: float = GRACE_SECONDS,
    stdout: int | None = None,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a child in a process group of its own, and ends the group however the block ends.

    What it prints goes to the file `path`, but for its standard output if that is to go elsewhere. It starts
    in the `folder`, if there is one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            # Sets of strings have the order of the seed, unless the user says otherwise.
            env={"PYTHONHASHSEED": str(seed), **os.environ},
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process, grace)


def wait(process: subprocess.Popen[bytes], timeout: float | None, stop: Stop) -> bool:
    """Waits for the child's end; False if the time was over before, or `stop` came."""
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while not stop:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return True
        if time.monotonic() >= deadline:
            break
    return False


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ends a child that still runs: politely, then by force; and whatever it started, at once."""
    try:
        if process.poll() is None:
            send(process, signal.SIGTERM)
            process.wait(grace)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # What a child leaves running would slow down the next one.
        send(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the whole group of the child; on Windows, where there is none, to it."""
    if os.name != "posix":
        process.terminate()
        return
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group that is gone
        return


SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stop:
    """Says whether a signal came; a second one interrupts whatever is done about the first."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
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
