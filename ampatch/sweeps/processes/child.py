"""The inside of one run, a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

import ampatch as amp
from ampatch import apex
from ampatch.apex.run_command import advice
from ampatch.sweeps.files import to_plain
from ampatch.sweeps.measure.reads import Audit, ReadWatch
from ampatch.sweeps.measure.recorder import EnoughSteps, Recorder
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.processes.ranks import own_part
from ampatch.sweeps.switches import find_file
from ampatch.tools.log_file import line_of
from ampatch.tools.seeds import set_seeds, shifted_seeds


def main(arguments: Sequence[str]) -> None:
    """Carries out what this rank has of a `PlannedRun`, which is given as JSON."""
    carry_out(own_part(PlannedRun.from_json(arguments[0])))


def carry_out(run: PlannedRun) -> None:
    """Runs the script as `__main__`; however it ends, what was measured is written.

    Exceptions pass, since the traceback belongs in the log; a line about them is written as well.
    """
    process = os.getpid()
    audit = Audit()
    audit.listener = ReadWatch(run.earlier, (Path(), find_file(run.script).parent))
    # A script that goes on after its last step, whatever is raised, may have to be ended by force.
    recorder = Recorder(run.steps, lambda: write(run, recorder), audit.listener, run.limits)
    signal.signal(signal.SIGTERM, exit_at_signal)
    try:
        apex.install(post_mortem=False, **run.overrides)
        if run.script.name.startswith("ampatch."):  # of `sweep`; the working directory comes first later
            import_module(run.script.name)
        with conditions(run, recorder):
            run.script.run()
    except EnoughSteps:
        return
    except Exception as error:
        recorder.note_error(error)
        if os.getpid() == process:
            said = [line.replace("ampatch run", "ampatch sweep") for line in advice(run.script, error)]
            text = "; ".join([line_of(error), *said])
            run.file("raised").write_text(text, encoding="utf-8", errors="backslashreplace")
        raise
    finally:
        # A script may fork, and its children come through here as well.
        if os.getpid() == process and not run.file("json").exists():
            write(run, recorder)


def write(run: PlannedRun, recorder: Recorder) -> None:
    """Writes what was measured."""
    run.file("json").write_text(json.dumps(to_plain(recorder.measured(run.warmup))))


@contextmanager
def conditions(run: PlannedRun, recorder: Recorder) -> Iterator[None]:
    """Seeds everything, and lets the observers watch, while the context is open."""
    with ExitStack() as stack:
        stack.enter_context(amp.observe(recorder))
        if run.autocast_dtype is not None:
            from ampatch.sweeps.measure.yardstick import Autocast  # which imports torch's compiler

            yardstick = recorder.yardstick = Autocast(getattr(torch, run.autocast_dtype))
            stack.callback(yardstick.close)
            stack.enter_context(amp.observe(yardstick))
        set_seeds(run.seed)
        if run.shift_seeds:
            stack.enter_context(shifted_seeds(run.seed))
        yield


def exit_at_signal(number: int, frame: object) -> NoReturn:
    """Turns a signal into an exception, so that `finally` blocks run."""
    sys.exit(128 + number)
