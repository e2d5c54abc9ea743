"""The words around the table: what was run, what its columns mean, how runs failed."""

from __future__ import annotations

from ampatch.sweeps.columns import COLUMNS
from ampatch.sweeps.records.record import LAST_LOSSES, Ending, RunRecord
from ampatch.sweeps.records.sweep import Sweep
from ampatch.sweeps.verdicts.distance import GUESSED_SPREAD
from ampatch.tools.numbers import ASCII, duration

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
    ranks = settings.nproc_per_node
    if len(settings.devices) > 1:
        times += f", {len(settings.devices)} runs side by side"
    name = settings.script if ranks is None else f"{settings.script} on {ASCII.plural(ranks, 'rank')}"
    return f"{name}: {times}, torch {sweep.environment.torch}, {device_of(sweep)}"


def device_of(sweep: Sweep) -> str:
    """Names the GPU, or the processor where there was none."""
    environment = sweep.environment
    return environment.cpu or "cpu" if environment.device == "cpu" else environment.device


def said_of_columns(sweep: Sweep) -> str:
    """Says how the columns were measured."""
    kinds = sorted({record.measured.memory for record in sweep.records if record.measured})
    facts = {
        "warmup": said_of_warmup(sweep),
        "memory": " or ".join(kinds) or "resident",
        "distances": said_of_distances(sweep),
    }
    return " ".join(filter(None, (column.said.format(**facts) for column in COLUMNS)))


def said_of_warmup(sweep: Sweep) -> str:
    """Says which steps the times are of, to be read after "median"."""
    warmup = sweep.settings.warmup
    if warmup == 0:
        return "of all steps"
    # The first step has no time, whatever is left out.
    timed = [it.measured for it in sweep.records if it.measured and it.measured.step_ms]
    short = [it.steps - 1 <= warmup for it in timed]
    if short and all(short):
        return "without the first half of so short a run"
    first = "without the first step" if warmup == 1 else f"without the first {warmup} steps"
    return f"{first}, or the first half of a run too short for that" if any(short) else first


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


def failure_of(record: RunRecord, name: str) -> str:
    """Says in one line how a run of a row of this name failed, and where its log is."""
    seed = f" seed {record.seed}" + (f" repeat {record.repeat}" if record.repeat else "")
    after = f" after {duration(record.seconds)}" if record.outcome is Ending.TIMED_OUT else ""
    steps = record.measured.steps if record.measured else 0
    made = f" (step {steps})" if steps else ""
    cause = f": {record.cause}" if record.cause else ""
    log = f" (log: {record.log})" if record.log else ""
    return f"{name}{seed} {record.outcome}{after}{made}{cause}{log}"


# ---- Text that a terminal can show: nothing that it would obey ----


def printable(text: str) -> str:
    """Escapes what a terminal would obey, and halves of characters, which no encoding can write.

    >>> print(printable("caf\\u00e9 \\x1b[31m"))
    café \\x1b[31m
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def cut_middle(text: str, length: int) -> str:
    """Cuts what is too much out of a text, and keeps its last 7 characters.

    >>> cut_middle("O2 keep_batchnorm_fp32=False seed 2", 20)
    'O2 keep_b... seed 2'
    """
    return text if len(text) <= length else f"{text[: length - 11]}... {text[-7:].strip()}"
