"""The inside of one run: a script in a process of its own, or a function in this one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import torch

import ampatch as amp
from ampatch import apex
from ampatch.apex.run_command import advice
from ampatch.sweeps.log_file import line_of, lines_of
from ampatch.sweeps.measure.meter import EnoughSteps, TrainingMeter, reset_peak
from ampatch.sweeps.measure.reads import Audit, ReadWatch
from ampatch.sweeps.plan import PlannedRun, find_file
from ampatch.sweeps.results import to_plain
from ampatch.sweeps.rows import Ending, Run
from ampatch.sweeps.runner import NO_STEPS, own_part
from ampatch.tools.process import Stop
from ampatch.tools.seeds import restored_seeds, set_seeds, shifted_seeds


def main(arguments: Sequence[str]) -> None:
    carry_out(own_part(PlannedRun.from_json(arguments[0])))


def carry_out(run: PlannedRun) -> None:
    """Runs the script as `__main__`; however it ends, what was measured is written.

    Exceptions pass, since the traceback belongs in the log; a line about them is written as well.
    """
    process = os.getpid()
    audit = Audit()
    audit.listener = ReadWatch(run.earlier, (Path(), find_file(run.script).parent))
    # A script that goes on after its last step, whatever is raised, may have to be ended by force.
    meter = TrainingMeter(run.steps, lambda: write(run, meter), audit.listener, run.limits)
    signal.signal(signal.SIGTERM, exit_at_signal)
    try:
        apex.install(post_mortem=False, **run.overrides)
        with conditions(run, meter):
            run.script.run()
    except EnoughSteps:
        return
    except Exception as error:
        meter.record_error(error)
        if os.getpid() == process:
            hints = [line.replace("ampatch run", "ampatch sweep") for line in advice(run.script, error)]
            text = "; ".join([line_of(error), *hints])
            run.file("raised").write_text(text, encoding="utf-8", errors="backslashreplace")
        raise
    finally:
        # A script may fork, and its children come through here as well.
        if os.getpid() == process and not run.file("json").exists():
            write(run, meter)


def write(run: PlannedRun, meter: TrainingMeter) -> None:
    run.file("json").write_text(json.dumps(to_plain(meter.measured())))


@contextmanager
def conditions(run: PlannedRun, meter: TrainingMeter) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(amp.observe(meter))
        if run.autocast_dtype is not None:
            from ampatch.sweeps.measure.yardstick import Autocast  # which imports torch's compiler

            yardstick = meter.yardstick = Autocast(getattr(torch, run.autocast_dtype))
            stack.callback(yardstick.close)
            stack.enter_context(amp.observe(yardstick))
        set_seeds(run.seed)
        if run.shift_seeds:
            stack.enter_context(shifted_seeds(run.seed))
        yield


def exit_at_signal(number: int, frame: object) -> NoReturn:
    """Turns a signal into an exception, so that `finally` blocks run."""
    sys.exit(128 + number)


# ---- A function, in this process ----

Train = Callable[[str, int], object]


class FunctionRunner:
    """Executes runs of a function in this process, in the place of `runner.execute`."""

    def __init__(self, train: Train) -> None:
        self._train = train
        self._audit = Audit()

    def __call__(self, run: PlannedRun, timeout: float | None, stop: Stop) -> Run:
        """Calls the function, and makes a row of what was measured."""
        reset_peak()
        self._audit.listener = ReadWatch(run.earlier)
        meter = TrainingMeter(run.steps, reads=self._audit.listener, limits=run.limits)
        start = time.monotonic()
        error = self._call(run, meter)
        seconds, measured = time.monotonic() - start, meter.measured()
        self._audit.listener = None
        cause, lines = "" if measured["steps"] else NO_STEPS, ()
        if error is not None:
            measured["outcome"], cause = Ending.CRASHED, line_of(error)
            lines = lines_of("".join(traceback.format_exception(error)))
        facts = {"seconds": seconds, "cause": cause, "lines": lines}
        return Run(**run.identity(), **facts, ended=time.time_ns(), **measured)

    def _call(self, run: PlannedRun, meter: TrainingMeter) -> Exception | None:
        with restored_seeds():
            try:
                with amp.override(**run.overrides), conditions(run, meter):
                    try:
                        metrics = self._train(run.overrides["opt_level"], run.seed)
                        if isinstance(metrics, dict):
                            amp.report(**metrics)
                    finally:
                        amp.uninitialize()
            except EnoughSteps:
                return None
            except Exception as error:
                meter.record_error(error)
                return error
        return None
