"""What stands around the table in the terminal: what was run, what its columns mean, how runs failed."""

from __future__ import annotations

from ampatch.sweeps.processes.warmup import said_of_warmup
from ampatch.sweeps.records.numbers import ASCII, duration
from ampatch.sweeps.records.record import LAST_LOSSES, Ending, Record
from ampatch.sweeps.records.sweep import Sweep
from ampatch.sweeps.verdicts.distance import GUESSED_SPREAD

UNITS = {
    "seeds": "the standard deviation of O0 over the seeds",
    "steps": f"the standard error of O0's last {LAST_LOSSES} losses",
    "percent": f"{ASCII.percent(GUESSED_SPREAD)} of O0's value",
}


def title(sweep: Sweep) -> str:
    """Says what was run, how often, and where."""
    settings = sweep.settings
    times = ASCII.plural(settings.seeds, "seed")
    if settings.repeat > 1:
        times += f" x {settings.repeat}"
    return f"{settings.script}: {times}, torch {sweep.environment.torch}, {device_of(sweep)}"


def device_of(sweep: Sweep) -> str:
    """Names the GPU, or the processor where there was none."""
    environment = sweep.environment
    return environment.cpu or "cpu" if environment.device == "cpu" else environment.device


def said_of_columns(sweep: Sweep) -> str:
    """Says how the columns were measured."""
    kinds = sorted({record.measured.memory for record in sweep.records if record.measured})
    sentences = [
        f"ms a step: median {said_of_warmup(sweep)}, +- half the range between the quartiles.",
        f"peak MiB: {' or '.join(kinds) or 'resident'} memory.",
        f"final loss: mean of the last {LAST_LOSSES}.",
        said_of_distances(sweep),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def said_of_distances(sweep: Sweep) -> str:
    """Says what the distances from O0 are, and from which one on a level is worse."""
    baseline = sweep.row()
    known = [it.unit for it in (baseline.loss, *baseline.metrics.values()) if it.spread] if baseline else []
    if not known:
        return ""
    units = " or ".join(UNITS[unit] for unit in dict.fromkeys(known))
    return (
        f"from O0: the loss or metric that did worst, in spreads ({units}); below "
        f"-{ASCII.short(sweep.settings.tolerance)} is worse."
    )


def failure_of(record: Record, name: str) -> str:
    """Says in one line how a run of a row of this name failed, and where its log is."""
    seed = f" seed {record.seed}" + (f" repeat {record.repeat}" if record.repeat else "")
    after = f" after {duration(record.seconds)}" if record.outcome is Ending.TIMED_OUT else ""
    steps = record.measured.steps if record.measured else 0
    made = f" (step {steps})" if steps else ""
    cause = f": {record.cause}" if record.cause else ""
    log = f" (log: {record.log})" if record.log else ""
    return f"{name}{seed} {record.outcome}{after}{made}{cause}{log}"
