"""Runs of a function in this process, for functions that no other process can import."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import ampatch as amp
from ampatch import AmpError, AmpValueError
from ampatch.sweeps.measure.memory import reset_peak
from ampatch.sweeps.measure.reads import Audit, ReadWatch
from ampatch.sweeps.measure.recorder import EnoughSteps, Recorder
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.processes.child import conditions
from ampatch.sweeps.processes.runner import NO_STEPS, Execute
from ampatch.sweeps.rows import Ending, Run
from ampatch.sweeps.variant import in_use
from ampatch.tools.log_file import line_of, lines_of
from ampatch.tools.seeds import kept_seeds
from ampatch.tools.stop import Stop

Train = Callable[[str, int], object]


def require_here(timeout: float | None) -> None:
    """Raises AmpError if no run can be made in this process.

    None can be ended after a time, and a session that is open would end with the first of them.
    """
    if timeout is not None:
        raise AmpValueError(
            "timeout needs processes=True, and a function that they can import: here it cannot be stopped"
        )
    if in_use():
        raise AmpError(
            "this process has called initialize: call ampatch.uninitialize() first, or sweep a function that "
            "other processes can import, with processes=True"
        )


def execute_here(train: Train) -> Execute:
    """Returns what executes a run of the function, in the place of `runner.execute`."""
    audit = Audit()

    def execute(run: PlannedRun, timeout: float | None, stop: Stop) -> Run:
        reset_peak()
        audit.listener = ReadWatch(run.earlier)
        recorder = Recorder(run.steps, reads=audit.listener, limits=run.limits)
        start = time.monotonic()
        error = train_here(train, run, recorder)
        seconds, measured = time.monotonic() - start, recorder.measured(run.warmup)
        audit.listener = None
        cause, lines = "" if measured["steps"] else NO_STEPS, ()
        if error is not None:
            measured["outcome"], cause = Ending.CRASHED, line_of(error)
            lines = lines_of("".join(traceback.format_exception(error)))
        facts = {"seconds": seconds, "cause": cause, "lines": lines}
        return Run(**run.identity(), **facts, ended=time.time_ns(), **measured)

    return execute


def train_here(train: Train, run: PlannedRun, recorder: Recorder) -> Exception | None:
    """Calls the function, and ends its session while observers watch; returns what it raised."""
    with kept_seeds():
        try:
            with amp.override(**run.overrides), conditions(run, recorder):
                try:
                    call(train, run.overrides["opt_level"], run.seed)
                finally:
                    amp.uninitialize()
        except EnoughSteps:
            return None
        except Exception as error:
            recorder.note_error(error)
            return error
    return None


def call(train: Train, level: str, seed: int) -> None:
    """Calls the function, and reports the metrics that it returns."""
    result = train(level, seed)
    if isinstance(result, dict):
        amp.report(**result)
