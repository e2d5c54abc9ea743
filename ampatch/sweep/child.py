"""The inside of one run: `python -m ampatch.sweep.child RUN`, where RUN is a `Run` as JSON."""

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import NoReturn

import ampatch as amp
from ampatch import apex
from ampatch.script import Script
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
        apex.install(**run.overrides)
        with amp.observe(recorder):
            Script(run.script, run.script_arguments).run()
    finally:
        # A script may fork, and its children come through here as well.
        if os.getpid() == process:
            run.measured.write_text(json.dumps(asdict(recorder.measured())))


def exit_at_signal(number: int, frame: object) -> NoReturn:
    """Turns a signal into an exception, so that `finally` blocks run."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main(Run.from_json(sys.argv[1]))
