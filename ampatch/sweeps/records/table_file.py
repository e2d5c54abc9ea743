"""The file sweep.csv: a line for each run of a sweep, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ampatch.sweeps.records.record import Measured, Record
from ampatch.sweeps.records.sweep import Environment, Sweep

Cell = str | int | float | None

# The columns of what was measured: the heading, and where the value is in `Measured`.
# Units are in the headings: `_ms` milliseconds a step, `_mib` MiB.
COLUMNS = {
    "steps": "steps",
    "skipped": "skipped",
    "step_ms": "step_ms.median",
    "step_ms_low": "step_ms.low",
    "step_ms_high": "step_ms.high",
    "forward_ms": "forward_ms.median",
    "backward_ms": "backward_ms.median",
    "update_ms": "update_ms.median",
    "steps_per_second": "steps_per_second",
    "samples_per_second": "samples_per_second",
    "memory": "memory",
    "peak_mib": "peak_mib",
    "parameters_bytes": "bytes.parameters",
    "masters_bytes": "bytes.masters",
    "gradients_bytes": "bytes.gradients",
    "optimizer_state_bytes": "bytes.optimizer_state",
    "casts_bytes": "bytes.casts",
    "casts_made": "casts.made",
    "casts_reused": "casts.reused",
    "first_loss": "first_loss",
    "final_loss": "final_loss",
    "loss_noise": "loss_noise",
    "loss_scale": "loss_scale",
}
RUN = ("row", "seed", "repeat", "outcome", "seconds", "cause")
PLACE = ("torch", "device")


def to_csv(sweep: Sweep) -> str:
    """Writes one line a run: which it was, how it ended, what it measured, the last value of each metric.

    A cell is empty where nothing was measured. Numbers are written so that they are read back exactly; those
    that are not finite are nan, inf and -inf.
    """
    measured = [record.measured for record in sweep.records if record.measured]
    metrics = list(dict.fromkeys(name for each in measured for name in each.metrics))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*RUN, *COLUMNS, *(f"metric:{name}" for name in metrics), *PLACE])
    for record in sweep.records:
        writer.writerow(line(record, metrics, sweep.environment))
    return file.getvalue()


def line(record: Record, metrics: Sequence[str], environment: Environment) -> list[Cell]:
    """Returns the cells of a run."""
    run = [getattr(record, name) for name in RUN]
    place = [getattr(environment, name) for name in PLACE]
    measured = record.measured
    if measured is None:
        return [*run, *[None] * (len(COLUMNS) + len(metrics)), *place]
    return [*run, *(cell(measured, path) for path in COLUMNS.values()), *map(measured.final, metrics), *place]


def cell(measured: Measured, path: str) -> Cell:
    """Reads a value, None where it, or what it is a part of, was not measured; steps are counted."""
    whole, _, part = path.partition(".")
    value = getattr(measured, whole)
    if isinstance(value, tuple):
        return len(value)
    return getattr(value, part) if part and value is not None else value
