"""Runs a plan from its first run to its last, and keeps the rows."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from ampatch import AmpValueError, __version__
from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.measure.load import find_cpus, read_text
from ampatch.sweeps.numbers import duration
from ampatch.sweeps.plan import Plan, PlannedRun
from ampatch.sweeps.results import Results
from ampatch.sweeps.rows import BASELINE, LEVELS, Ending, Environment, Run, Sweep, finished
from ampatch.sweeps.runner import Execute, execute
from ampatch.tools.process import Stop

# Times as long as O0 has taken: a level that needs more gains nothing, whatever it comes to.
PATIENCE = 2


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is: the run that is on, or the one that is over if it has a `record`."""

    name: str
    record: Run | None
    done: int  # runs, those that were left out as well
    total: int
    left: float | None  # seconds that the rest takes, None if that is not known yet

    def __str__(self) -> str:
        if self.record is None:
            return self.name
        left = f", about {duration(self.left)} left" if self.left and self.done < self.total else ""
        took = duration(self.record.seconds)
        return f"{self.name}: {self.record.outcome} after {took} ({self.done} of {self.total}{left})"


Show = Callable[[SweepProgress], None]


class SweepCampaign:
    """A plan that is being carried out: `records` are the runs that are over, now or in what is resumed."""

    def __init__(
        self, plan: Plan, results: Results, stop: Stop, run: Execute | None = None, made: Sequence[Run] = ()
    ) -> None:
        self.records: list[Run] = list(made)
        self._execute = run or execute
        self._plan = plan
        self._results = results
        self._stop = stop
        self._environment = collect()

    def carry_out(self, show: Show) -> None:
        """Executes run after run until the last one or until it is stopped, and saves what was measured.

        A row that timed out, or was cut short, is not run again. Raises AmpValueError if the first run shows
        that the script cannot be compared.
        """
        ahead = self._without_made(list(self._plan.runs()))
        while ahead and not self._stop:
            run = self._prepared(ahead.pop(0))
            show(self._progress(run, [run, *ahead]))
            record = self._execute(run, self._plan.settings.timeout, self._stop)
            if not self.records:
                validate_first(record, self._plan)
            self.records.append(record)
            ahead = self._without_made(ahead)
            self._results.save_measured(self.sweep)
            show(self._progress(run, ahead, record))

    def _prepared(self, run: PlannedRun) -> PlannedRun:
        # A script may change the working directory.
        logs = str(self._results.logs.absolute())
        earlier = tuple(record.training for record in self.records)
        return replace(run, directory=logs, earlier=earlier, limits=self._limits(run))

    def _limits(self, run: PlannedRun) -> tuple[float, float] | None:
        """Returns after how many seconds a run of a level that its user did not name is cut short.

        Ranks are not: they would stop at different steps, and wait for each other.
        """
        may_be_cut = run.row in LEVELS and run.row != BASELINE and not self._plan.settings.in_full
        origin = [run for run in finished(self.records, BASELINE) if run.processor_ms]
        if not may_be_cut or run.nproc_per_node or not origin:
            return None
        seconds = max((run.training.ended - run.training.began) / 1e9 for run in origin)
        busy = max(run.steps * run.processor_ms / 1000 for run in origin)
        return PATIENCE * seconds, PATIENCE * busy

    def _without_made(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Leaves out the runs that were made, and those of rows that took too long."""
        made = [{"row": run.row, "seed": run.seed, "repeat": run.repeat} for run in self.records]
        slow = {run.row for run in self.records if run.outcome in (Ending.TIMED_OUT, Ending.CUT)}
        return [run for run in runs if run.identity() not in made and run.row not in slow]

    def _progress(
        self, run: PlannedRun, ahead: Sequence[PlannedRun], over: Run | None = None
    ) -> SweepProgress:
        name, total = self._title(run), self._plan.settings.runs
        return SweepProgress(name, over, total - len(ahead), total, self._seconds_left(ahead))

    def _seconds_left(self, ahead: Sequence[PlannedRun]) -> float | None:
        """Returns the seconds that runs take if each takes as long as its row did, or as the typical run."""
        if not self.records:
            return None
        usual = statistics.median(run.seconds for run in self.records)
        takes = {run.row: run.seconds for run in self.records}
        return sum(takes.get(run.row, usual) for run in ahead)

    def sweep(self) -> Sweep:
        """Makes of the runs what there is to make of them."""
        environment = with_device(self._environment, self.records)
        return summarize(self._plan.settings, environment, self.records)

    def _title(self, run: PlannedRun) -> str:
        """Names a run, with its seed and repeat where there are several."""
        asked = self._plan.settings
        seed = f" seed {run.seed}" if asked.seeds > 1 else ""
        return f"{run.row}{seed}{f' repeat {run.repeat}' if asked.repeat > 1 else ''}"


def validate_first(record: Run, plan: Plan) -> None:
    """Raises AmpValueError if the script failed before a level could matter, or had nothing to measure."""
    name = plan.settings.script
    log = f" (log: {record.log})" if record.log else ""
    # Without a peak of memory it left nothing that says what it called.
    if record.outcome is Ending.CRASHED and not record.initialized and record.peak_mib is not None:
        raise AmpValueError(
            f"'{name}' failed before it called initialize, as it would at every level: {record.cause}{log}"
        )
    if record.outcome is not Ending.NO_STEPS:
        return
    if not record.initialized:
        raise AmpValueError(
            f"'{name}' never called initialize (or did so with enabled=False, or in another process), so "
            "every level would be the same: add the line `amp.initialize(model, optimizer)`, or give the "
            f"option of the script that turns mixed precision on after --, as in `-- --fp16`{log}"
        )
    raise AmpValueError(
        f"'{name}' called initialize, but no optimizer that it got made a step at {record.row}, so "
        f"there is nothing to measure: expected calls of optimizer.step(){log}"
    )


# ---- Where a sweep runs: versions, machine and command, for the reader of its files ----

CPUS = Path("/proc/cpuinfo")
HALF_FLAGS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "asimdhp", "bf16")


def collect() -> Environment:
    """Looks around; what cannot be found out is left out, and nothing raises."""
    return Environment(
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command_as_typed(),
        device="cpu",
        **describe_machine(),
    )


def describe_machine() -> dict[str, object]:
    """Returns the versions and the processor of this process: fields of an `Environment`."""
    return {
        "ampatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": find_cpu(),
        "cores": len(find_cpus()),
        "threads": torch.get_num_threads(),
        "half": find_half_flags(),
    }


def command_as_typed() -> str:
    """Returns the command line of this process; of a notebook, which nobody started by one, nothing.

    Texts of many lines, as `python -c` takes, are left out.
    """
    if "ipykernel" in sys.modules:
        return ""
    first, *words = sys.orig_argv or ["python"]
    if words and Path(words[0]).stem == "ampatch":  # the script that pip made
        first, *words = words
    name = Path(first).stem if os.name == "nt" else Path(first).name
    return shlex.join([name, *("..." if "\n" in word else word for word in words)])


def with_device(environment: Environment, runs: Iterable[Run]) -> Environment:
    """Adds the device that the runs were on: asked for here, a GPU would lose memory to this process."""
    return replace(environment, device=next((run.device for run in runs if run.device != "cpu"), "cpu"))


def find_half_flags() -> str | None:
    """Returns the instructions for half types that Linux says the CPU has, None elsewhere."""
    words = set(read_text(CPUS).split())
    return ", ".join(flag for flag in HALF_FLAGS if flag in words) if words else None


def find_cpu() -> str:
    """Returns the name of the CPU, as Linux knows it or else as Python does."""
    lines = [line.partition(":") for line in read_text(CPUS).splitlines()]
    names = [value.strip() for name, _, value in lines if name.strip() in ("model name", "Model", "cpu")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")
