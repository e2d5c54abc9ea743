"""One run of a script, in a process of its own: what it is asked to do, and what it leaves behind."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ampatch.doctor.instruments.operations import Origin
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.fault import SilentFault
from ampatch.doctor.suspects import find_suspects
from ampatch.tools.folder import HELD
from ampatch.tools.process import START, child_process, wait
from ampatch.tools.stop import noting_signals


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script, which is watched, and traced as well if `traces`.

    `level` is the opt level that it is made to use, None for its own; `float32` turns off what torch itself
    casts and scales; `keep_fp32` are the modules that run in float32. `window` are the attempts at a step
    that are traced, after which the run ends unless it `goes_on`; None: all of them. What was seen is written
    to the file `out`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    out: str = ""
    level: str | None = None
    float32: bool = False
    traces: bool = False
    window: tuple[int, ...] | None = None
    goes_on: bool = False
    keep_fp32: tuple[str, ...] = ()
    # What is noted beside: growth, at each so many attempts; what slows it down; one attempt's numbers.
    every: int | None = None
    speed: bool = False
    sample: int | None = None  # the attempt whose numbers go to the folder `samples`
    samples: str = ""
    device: str | None = None  # as of a `Script`
    legacy: bool = False
    unsafe_load: bool = False
    most: int | None = None  # attempts, after which the run ends
    # What is tried: texts of files by path, bfloat16 where torch.autocast takes float16, what a
    # dynamic loss scale starts with, a part of the rate.
    edits: dict[str, str] = field(default_factory=dict)
    bfloat16: bool = False
    init_scale: float | None = None
    rate: float = 1.0

    def to_json(self) -> str:
        """Returns the arguments of a child process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run of a script left behind; `growth` and `speed` only where they were asked for.

    `is_open` says that it ended on a forward with gradients which no step followed, as one does that gives up
    on a bad loss: what was traced there belongs to the attempt after the last.
    """

    attempts: tuple[Attempt, ...]
    is_open: bool
    is_half: bool  # a model had half parameters
    origins: tuple[Origin, ...]
    silent: tuple[SilentFault, ...] = ()
    shares: dict[int, float] = field(default_factory=dict)  # as `Ranges` notes them
    growth: dict | None = None
    speed: dict | None = None
    without_gpu: tuple[str, ...] = ()  # lines that turn on autocast for a GPU that is not there
    autocast: str | None = None  # the device for which torch.autocast was on, in a traced run
    oversized: tuple[str, ...] = ()  # layers that take or give in float32 what float16 cannot hold

    @classmethod
    def read(cls, file: Path) -> Seen:
        """Reads what a child of ours wrote."""
        return pickle.loads(file.read_bytes())

    @property
    def suspects(self) -> tuple[int, ...]:
        """The attempts to look at."""
        return find_suspects(self.attempts) + ((len(self.attempts),) if self.is_open else ())


Launch = Callable[[Run, Path], tuple[int, str]]  # runs it, and returns the exit status and standard error


def start_process(run: Run, folder: Path) -> tuple[int, str]:
    """Runs a script in a fresh process; returns its exit status and standard error.

    A signal that ends this process ends that one first, and what it has started.
    """
    command = [sys.executable, START, str(folder / HELD), "ampatch.doctor.child", run.to_json()]
    log = Path(folder, "stderr")
    with noting_signals() as stop, child_process(command, log, stdout=subprocess.DEVNULL) as process:
        wait(process, None, stop, lambda: None)
    if stop:
        raise KeyboardInterrupt if stop.signal == signal.SIGINT else SystemExit(stop.status)
    return process.returncode, log.read_text(errors="replace")
