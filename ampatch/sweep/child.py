"""The inside of one run: `python -m ampatch.sweep.child RUN`, where RUN is a `Run` as JSON."""

import json
import os
import runpy
import signal
import sys
from dataclasses import asdict
from typing import NoReturn

import ampatch as amp
from ampatch.sweep.plan import Run
from ampatch.sweep.recorder import Recorder


def main(run: Run) -> None:
    """Runs the script as `__main__`; however it ends, what was measured is written.

    Exceptions pass: the traceback belongs in the log, and the exit status says the rest.
    """
    process = os.getpid()
    recorder = Recorder(run.progress)
    signal.signal(signal.SIGTERM, exit_at_signal)
    try:
        with amp.override(**run.overrides), amp.observe(recorder):
            run_script(run)
    finally:
        # A script may fork, and its children come through here as well.
        if os.getpid() == process:
            run.measured.write_text(json.dumps(asdict(recorder.measured())))


def run_script(run: Run) -> None:
    """Runs the script with the sys.argv, sys.path and `__file__` that `python SCRIPT` gives it."""
    sys.argv = [run.script, *run.script_arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(run.script))
    runpy.run_path(run.script, run_name="__main__")


def exit_at_signal(number: int, frame: object) -> NoReturn:
    """Turns a signal into an exception, so that `finally` blocks run."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main(Run.from_json(sys.argv[1]))
