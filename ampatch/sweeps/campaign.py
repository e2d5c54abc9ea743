"""Runs a plan from its first run to its last, and keeps the records."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ampatch import AmpValueError
from ampatch.sweeps.environment import collect, with_device
from ampatch.sweeps.forecast import Forecast
from ampatch.sweeps.plan import Plan, PlannedRun
from ampatch.sweeps.processes.devices import Device
from ampatch.sweeps.processes.runner import Execute, execute, shorten
from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.results import Results
from ampatch.sweeps.records.sweep import Sweep
from ampatch.sweeps.switches import find_switches
from ampatch.sweeps.verdicts.recommendation import is_too_noisy
from ampatch.sweeps.verdicts.summary import summarize
from ampatch.tools.stop import Stop


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is: the run that is on, or the one that is over if it has a `record`."""

    name: str
    steps: int
    record: RunRecord | None
    done: int  # runs, those that were left out as well
    total: int
    left: float | None  # seconds that the rest takes, None if that is not known yet


Show = Callable[[SweepProgress], None]


class SweepCampaign:
    """A plan that is being carried out: `records` are those of the runs that are over."""

    def __init__(
        self, plan: Plan, results: Results, stop: Stop, run: Execute | None = None, made: Sequence[RunRecord] = ()
    ) -> None:
        self.records: list[RunRecord] = list(made)
        self._execute = run or execute
        self._plan = plan
        self._devices = plan.devices or (Device(""),)
        self._results = results
        self._stop = stop
        self._environment = collect(plan.script)
        self._forecast = Forecast(plan.settings.steps)
        self._began = time.monotonic()
        self._total = plan.count
        self._pending = 0  # runs that are on

    def carry_out(self, show: Show) -> None:
        """Executes run after run until the last one or until it is stopped, and saves what was measured.

        A row that timed out is not run again. A sweep that is in the folder is replaced when a run has
        finished, or when all of them have failed. Raises AmpValueError if the first run shows that the script
        cannot be compared.
        """
        made = {(it.row, it.seed, it.repeat) for it in self.records}
        slow = {it.row for it in self.records if it.outcome is Ending.TIMED_OUT}
        ahead = [it for it in self._plan.runs() if (it.row, it.seed, it.repeat) not in made and it.row not in slow]
        while not self._stop and (ahead or self._repeat(ahead)):
            # Logs may have moved since it was planned, and a script may change the working directory.
            logs = str(self._results.logs.absolute())
            places = zip(ahead, self._devices, strict=False)
            facts = {"directory": logs, "earlier": tuple(record.training for record in self.records)}
            runs = [replace(run, visible=device.visible, **facts) for run, device in places]
            del ahead[: len(runs)]
            self._pending = len(runs)
            for run, record in zip(runs, self._watch(runs, ahead, show), strict=True):
                if not self.records:
                    validate_first(record, self._plan)
                others = [it for it in ahead if it.row != run.row]
                if record.outcome is Ending.TIMED_OUT and len(others) < len(ahead):
                    left_out, ahead = len(ahead) - len(others), others
                    said = f"{record.cause}; {left_out} more of its runs are left out"
                    record = replace(record, cause=said)
                self._keep(record)
                show(self._progress([run], ahead, 0, record))
        if not self._stop:
            self._results.replace_old()

    def _watch(
        self, runs: Sequence[PlannedRun], ahead: Sequence[PlannedRun], show: Show
    ) -> Sequence[RunRecord]:
        """Executes runs, side by side, and says meanwhile how far they are, and how long the rest takes."""

        def on_steps(steps: int) -> None:
            self._forecast.note_steps(steps)
            show(self._progress(runs, ahead, steps))

        self._forecast.start(runs[0].row)
        show(self._progress(runs, ahead))
        if self._plan.devices:
            with ThreadPoolExecutor(len(runs)) as pool:
                records = list(pool.map(self._execute_on, self._devices, runs))
        else:
            records = [self._execute(runs[0], self._plan.settings.timeout, on_steps, self._stop)]
        for record in records:
            self._forecast.finish(record)
        return records

    def _execute_on(self, device: Device, run: PlannedRun) -> RunRecord:
        """Executes a run in a thread of its own, whose processors the child inherits."""
        if device.cpus:
            os.sched_setaffinity(0, device.cpus)
        return self._execute(run, self._plan.settings.timeout, lambda steps: None, self._stop)

    def _progress(
        self, runs: Sequence[PlannedRun], ahead: Sequence[PlannedRun], steps: int = 0, *over: RunRecord
    ) -> SweepProgress:
        left = self._forecast.left(it.row for it in ahead)
        left = left and left / len(self._devices)
        done = self._total - len(ahead) - self._pending
        names, record = ", ".join(map(self._title, runs)), over[0] if over else None
        return SweepProgress(names, steps, record, done, self._total, left)

    def _repeat(self, ahead: list[PlannedRun]) -> bool:
        """Repeats it all once more, if times are not told apart and the budget has room for it."""
        if not self._plan.may_repeat or not is_too_noisy(self.sweep()):
            return False
        before = self._plan.settings
        again = replace(self._plan, settings=replace(before, repeat=before.repeat + 1))
        slow = {record.row for record in self.records if record.outcome is Ending.TIMED_OUT}
        runs = [it for it in again.runs() if it.repeat == before.repeat]
        runs = [it for it in runs if it.row not in slow]
        left = self._forecast.left(it.row for it in runs) or 0.0
        if time.monotonic() - self._began + left > before.budget * 60:
            return False
        self._plan = again
        ahead.extend(runs)
        self._total += len(runs)
        return True

    def _keep(self, record: RunRecord) -> None:
        self.records.append(record)
        self._pending -= 1
        if not record.failed:
            self._results.replace_old()
        self._results.save_measured(self.sweep)

    def sweep(self) -> Sweep:
        """Makes of the records what there is to make of them."""
        environment = with_device(self._environment, self.records)
        return summarize(self._plan.settings, environment, tuple(map(self._with_log, self.records)))

    def _with_log(self, record: RunRecord) -> RunRecord:
        # The logs of the first runs may have been moved since.
        if not record.log:
            return record
        return replace(record, log=shorten(self._results.logs.absolute() / Path(record.log).name))

    def _title(self, run: PlannedRun) -> str:
        """Names a run, with its seed and repeat where there are several."""
        asked = self._plan.settings
        seed = f" seed {run.seed}" if asked.seeds > 1 else ""
        repeat = f" repeat {run.repeat}" if asked.repeat > 1 or asked.budget else ""
        return f"{run.row}{seed}{repeat}"


def validate_first(record: RunRecord, plan: Plan) -> None:
    """Raises AmpValueError if the script failed before a level could matter, or had nothing to measure."""
    name = plan.settings.script
    log = f" (log: {record.log})" if record.log else ""
    called = record.measured is not None and record.measured.initialized
    if record.outcome is Ending.CRASHED and record.measured is not None and not called:
        raise AmpValueError(
            f"'{name}' failed before it called initialize, as it would at every level: {record.cause}{log}"
        )
    if record.outcome is not Ending.NO_STEPS:
        return
    if not called:
        raise AmpValueError(
            f"'{name}' never called initialize (or did so with enabled=False, or in another process), so "
            f"every level would be the same: {how_to_initialize(plan)}{log}"
        )
    raise AmpValueError(
        f"'{name}' called initialize, but no optimizer that it got made a step at {record.row}, so "
        f"there is nothing to measure: expected calls of optimizer.step(){log}"
    )


def how_to_initialize(plan: Plan) -> str:
    """Says what would have a script call `initialize`: an option of its own, or a line more."""
    switches = find_switches(plan.script)
    if not switches:
        return "add the line `amp.initialize(model, optimizer)`"
    line = shlex.join([*plan.script.arguments, *switches[0].split()])
    others = f" (or {', '.join(switches[1:])})" if switches[1:] else ""
    return f"it has the option {switches[0]}{others}: end the command with `-- {line}`"
