"""Starts one child process per run, watches it, and makes sure that it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ampatch import AmpValueError
from ampatch.sweep.plan import Run
from ampatch.sweep.record import Measured, Outcome, Record
from ampatch.sweep.steps import read_count

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0


def execute(run: Run, timeout: float | None, on_steps: Callable[[int], None]) -> Record:
    """Runs one child to its end; `on_steps` is told now and then how many steps it has made.

    Raises if the script ended well and never called `initialize`: no level could change anything.
    """
    start = time.monotonic()
    with child_process(run) as process:
        in_time = wait(process, timeout, lambda: on_steps(read_count(run.progress)))
        seconds = time.monotonic() - start
    measured = read_measured(run)
    outcome = judge(in_time, process.returncode, measured)
    if outcome is Outcome.NO_STEPS and not measured.initialized:
        raise AmpValueError(
            f"'{run.script}' never called initialize (or did so with enabled=False), so every "
            "level would be the same: add the line `amp.initialize(model, optimizer)`"
        )
    cause = "" if outcome is Outcome.FINISHED else explain(run.log, outcome, process.returncode)
    return Record(run.name, outcome, seconds, cause, str(run.log), measured)


@contextmanager
def child_process(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the child in a process group of its own, and ends the group however the block ends."""
    command = [sys.executable, "-u", "-m", "ampatch.sweep.child", run.to_json()]
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def wait(process: subprocess.Popen[bytes], timeout: float | None, on_poll: Callable[[], None]) -> bool:
    """Waits for the child and polls meanwhile; returns False if it was not done in time."""
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while time.monotonic() < deadline:
        try:
            process.wait(POLL_SECONDS)
            return True
        except subprocess.TimeoutExpired:
            on_poll()
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a child that still runs and what it started: politely, then by force."""
    if process.poll() is not None:
        return
    send(process, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        send(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the whole group of the child; on Windows, where there is none, to it."""
    if os.name != "posix":
        process.terminate()
        return
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def read_measured(run: Run) -> Measured | None:
    """Reads what the child left behind, None if it was ended before it could."""
    try:
        return Measured(**json.loads(run.measured.read_text()))
    except (OSError, ValueError):
        return None


def judge(in_time: bool, status: int, measured: Measured | None) -> Outcome:
    """Names how a run ended."""
    if not in_time:
        return Outcome.TIMED_OUT
    if status != 0 or measured is None:
        return Outcome.CRASHED
    return Outcome.FINISHED if measured.steps else Outcome.NO_STEPS


def explain(log: Path, outcome: Outcome, status: int) -> str:
    """Returns the last line of the log, after the ending where that line is no exception's."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "its log is empty")
    if status < 0:
        return f"{signal.Signals(-status).name}, {last}"
    # Python itself ends with 1 after an exception, and 143 is how we end what takes too long.
    return f"exit status {status}, {last}" if outcome is Outcome.CRASHED and status > 1 else last
