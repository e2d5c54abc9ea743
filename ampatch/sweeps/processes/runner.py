"""Starts one child process per run, watches it, and makes sure that it ends."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from ampatch.sweeps.files import from_plain
from ampatch.sweeps.measure.reads import shorten
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.processes import ranks
from ampatch.sweeps.processes.isolation import copy_working_directory
from ampatch.sweeps.rows import Ending, Run
from ampatch.tools.folder import temporary_folder
from ampatch.tools.log_file import last_lines
from ampatch.tools.process import GRACE_SECONDS, child_process, wait
from ampatch.tools.stop import Stop

Execute = Callable[[PlannedRun, float | None, Stop], Run]

NO_STEPS = "no optimizer that initialize returned made a step"
NO_INPUT = "EOFError: EOF when reading a line"  # what `input()` raises


def execute(run: PlannedRun, timeout: float | None, stop: Stop) -> Run:
    """Runs one child to its end, for `timeout` seconds at the most, or until `stop`.

    Leaves nothing but the log behind.
    """
    start, log = time.monotonic(), run.file("log")
    # Scripts clear their own output, in which the logs may be.
    with temporary_folder("run") as folder:
        inner = replace(run, directory=str(folder))
        grace = GRACE_SECONDS if run.nproc_per_node is None else ranks.SECONDS
        place = copy_working_directory(folder / "copy") if run.isolate else None
        with child_process(command_of(inner), log, run.seed, grace, folder=place) as process:
            has_ended = wait(process, timeout, stop, lambda: None)
            seconds = time.monotonic() - start
        measured = ranks.slowest([read_measured(rank) for rank in ranks.list_ranks(inner)])
        raised = ranks.first_raised(inner, last_lines(log))
    if has_ended:
        outcome = judge(process.returncode, measured)
    else:
        outcome = Ending.INTERRUPTED if stop else Ending.TIMED_OUT
    lines, cause = (), ""
    if outcome is not Ending.FINISHED:
        lines = last_lines(log)
        cause = explain(outcome, process.returncode, raised or lines, stop)
    facts = run.identity() | {"outcome": outcome, "seconds": seconds, "cause": cause, "lines": lines}
    return replace(measured or Run(run.row), **facts, log=shorten(str(log.absolute())), ended=time.time_ns())


def command_of(run: PlannedRun) -> list[str]:
    """Returns the child's command line."""
    return [sys.executable, "-u", *ranks.launcher(run), "ampatch.sweeps.processes.child", run.to_json()]


def read_measured(run: PlannedRun) -> Run | None:
    """Reads what the child left behind, None if it was ended before it could."""
    try:
        return from_plain(Run, {"row": run.row, **json.loads(run.file("json").read_text())})
    except (OSError, ValueError, TypeError):
        return None


def judge(status: int, measured: Run | None) -> Ending:
    """Names how a run ended that ended by itself."""
    if status != 0 or measured is None:
        return Ending.CRASHED
    return measured.outcome


def explain(outcome: Ending, status: int, lines: tuple[str, ...], stop: Stop) -> str:
    """Says in one line why a run failed: the last line of its log, and what that does not say.

    `lines` are the end of the log, or what the child said about its exception.
    """
    if outcome is Ending.INTERRUPTED:
        return stop.name
    last = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
    if outcome is Ending.NO_STEPS:
        return f"{NO_STEPS} ({last})"
    if outcome is Ending.TIMED_OUT:
        return last
    if last == NO_INPUT:
        last = f"{last} (a run has no standard input)"
    if status < 0:
        return f"{name_of_signal(-status)}, {last}"
    if status == 0:
        return f"it ended without Python's exit (as by os._exit), {last}"
    # Python itself ends with 1 after an exception.
    return last if status == 1 else f"exit status {status}, {last}"


def name_of_signal(number: int) -> str:
    """Names a signal, with what it often means; real-time signals have numbers alone."""
    hint = " (the system does so when memory runs out)" if number == 9 else ""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}") + hint
