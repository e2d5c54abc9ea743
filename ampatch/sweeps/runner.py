"""Starts one child process per run, watches it, and makes sure that it ends; a run may have several ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ampatch import AmpError
from ampatch.sweeps.log_file import last_lines
from ampatch.sweeps.measure.reads import shorten
from ampatch.sweeps.plan import PlannedRun, copy_working_directory
from ampatch.sweeps.results import to_run
from ampatch.sweeps.rows import Ending, Run
from ampatch.tools.folder import HELD, temporary_folder
from ampatch.tools.process import GRACE_SECONDS, START, Stop, child_process, wait

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
        grace = GRACE_SECONDS if run.nproc_per_node is None else SECONDS
        place = copy_working_directory(folder / "copy") if run.isolate else None
        with child_process(command_of(inner), log, run.seed, grace, folder=place) as process:
            has_ended = wait(process, timeout, stop)
            seconds = time.monotonic() - start
        measured = slowest([read_measured(rank) for rank in list_ranks(inner)])
        raised = first_raised(inner)
    if not has_ended:
        outcome = Ending.INTERRUPTED if stop else Ending.TIMED_OUT
    else:
        outcome = Ending.CRASHED if process.returncode or measured is None else measured.outcome
    lines, cause = (), ""
    if outcome is not Ending.FINISHED:
        lines = last_lines(log)
        cause = explain(outcome, process.returncode, raised or lines, stop)
    facts = run.identity() | {"outcome": outcome, "seconds": seconds, "cause": cause, "lines": lines}
    return replace(measured or Run(run.row), **facts, log=shorten(str(log.absolute())), ended=time.time_ns())


def command_of(run: PlannedRun) -> list[str]:
    return [sys.executable, "-u", *launcher(run), "ampatch.sweeps.child", run.to_json()]


def read_measured(run: PlannedRun) -> Run | None:
    """Reads what the child left behind, None if it was ended before it could."""
    try:
        return to_run({"row": run.row, **json.loads(run.file("json").read_text())})
    except (OSError, ValueError, TypeError):
        return None


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


# ---- A run on several ranks, which torch.distributed.run starts ----

TIMES = ("step_ms", "step_ms_low", "step_ms_high", "timed", "busy", "waited", "throttled", "processor_ms")
SECONDS = 40.0  # in which torch.distributed.run, told to end, ends its ranks by force: it takes 30


def refuse_ranks() -> None:
    """Raises AmpError in a process that is one rank of several: each of them would run all of a sweep."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        raise AmpError(
            "a sweep was started by torchrun, on each rank: start it once, as "
            f"`ampatch sweep --nproc-per-node {count} SCRIPT`; it starts the ranks of each run"
        )


def list_ranks(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run as each rank sees it: the files of all but the first are in folders of their own."""
    others = range(1, run.nproc_per_node or 1)
    return [run, *(replace(run, directory=str(Path(run.directory, f"rank{rank}"))) for rank in others)]


def own_part(run: PlannedRun) -> PlannedRun:
    """Returns the run as the rank of this process sees it."""
    own = list_ranks(run)[int(os.environ["RANK"]) if run.nproc_per_node else 0]
    Path(own.directory).mkdir(exist_ok=True)
    return own


def launcher(run: PlannedRun) -> list[str]:
    """Returns what goes before the module of a child on the command line."""
    start = [START, str(Path(run.directory, HELD))]
    if run.nproc_per_node is None:
        return start
    options = ["--standalone", "--nproc-per-node", str(run.nproc_per_node), "--log-dir", run.directory]
    return [*start, "torch.distributed.run", *options, *start]


def slowest(ranks: Sequence[Run | None]) -> Run | None:
    """Returns what the first rank measured, with the times of the slowest and the memory of the largest.

    None if a rank has left nothing.
    """
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    slow = max(known, key=lambda rank: rank.step_ms or 0.0)
    peak = max((rank.peak_mib for rank in known if rank.peak_mib is not None), default=None)
    return replace(known[0], **{name: getattr(slow, name) for name in TIMES}, peak_mib=peak)


def first_raised(run: PlannedRun) -> tuple[str, ...]:
    """Returns a line about the exception of the rank that raised first; nothing if none did.

    The others fail because of it: they wait for what it does not send any more.
    """
    paths = [one.file("raised") for one in list_ranks(run)]
    files = [(rank, path) for rank, path in enumerate(paths) if path.exists()]
    if not files:
        return ()
    rank, path = min(files, key=lambda file: file[1].stat().st_mtime_ns)
    lines = last_lines(path)
    return lines if run.nproc_per_node is None else tuple(f"rank {rank}: {line}" for line in lines)
