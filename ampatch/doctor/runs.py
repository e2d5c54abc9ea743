"""One run of a script, in a process of its own, and what it leaves behind."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.tape import Origin
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.suspects import find_suspects
from ampatch.tools.folder import HELD
from ampatch.tools.process import START, child_process, noting_signals, wait


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run of a script left behind.

    `is_open` says that it ended on a forward with gradients which no step followed, as one does that gives up
    on a bad loss: what was traced there belongs to the attempt after the last.
    """

    attempts: tuple[Attempt, ...]
    is_open: bool
    is_half: bool  # a model had half parameters
    origins: tuple[Origin, ...]
    halved: tuple[str, ...] = ()  # lines at which the script itself makes models half
    silent: tuple[Finding, ...] = ()
    shares: dict[int, float] = field(default_factory=dict)  # as `Ranges` notes them
    growth: dict[str, object] = field(default_factory=dict)  # as `Growth` knows it, of the watched run
    without_gpu: tuple[str, ...] = ()  # lines that turn on autocast for a GPU that is not there
    autocast: str | None = None  # the device for which torch.autocast was on, in a traced run
    oversized: tuple[str, ...] = ()  # layers that take or give in float32 what float16 cannot hold
    failed: tuple[str, ...] = ()  # what could not be looked for by a fault of ours
    is_late: bool = False  # it was ended because it took too long

    @classmethod
    def read(cls, file: Path) -> Seen:
        return pickle.loads(file.read_bytes())

    @property
    def suspects(self) -> tuple[int, ...]:
        """The attempts to look at."""
        return find_suspects(self.attempts) + ((len(self.attempts),) if self.is_open else ())


# Runs a script, and returns the exit status and standard error.
Launch = Callable[[ScriptRun, Path], tuple[int, str]]


def start_process(run: ScriptRun, folder: Path) -> tuple[int, str]:
    """Runs a script in a fresh process; returns its exit status and standard error.

    A signal that ends this process ends that one first, and what it has started.
    """
    command = [sys.executable, START, str(folder / HELD), "ampatch.doctor.child", run.to_json()]
    log = Path(folder, "stderr")
    with noting_signals() as stop, child_process(command, log, stdout=subprocess.DEVNULL) as process:
        wait(process, None, stop)
    if stop:
        raise KeyboardInterrupt if stop.signal == signal.SIGINT else SystemExit(stop.status)
    return process.returncode, log.read_text(errors="replace")
