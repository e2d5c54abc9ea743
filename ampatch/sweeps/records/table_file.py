"""The file sweep.csv: a line for each run of a sweep, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.record import Measured, Record
from ampatch.sweeps.records.sweep import Environment, Sweep

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Field:
    """A measured column: its heading, and how its cell is read; None leaves the cell empty."""

    heading: str
    read: Callable[[Measured], Cell]


# Units are in the headings, as in `Measured`: `_ms` milliseconds a step, `_mib` MiB.
FIELDS = (
    Field("steps", lambda it: it.steps),
    Field("skipped", lambda it: len(it.skipped)),
    Field("step_ms", lambda it: it.step_ms and it.step_ms.median),
    Field("step_ms_low", lambda it: it.step_ms and it.step_ms.low),
    Field("step_ms_high", lambda it: it.step_ms and it.step_ms.high),
    Field("forward_ms", lambda it: it.forward_ms and it.forward_ms.median),
    Field("backward_ms", lambda it: it.backward_ms and it.backward_ms.median),
    Field("update_ms", lambda it: it.update_ms and it.update_ms.median),
    Field("steps_per_second", lambda it: it.steps_per_second),
    Field("samples_per_second", lambda it: it.samples_per_second),
    Field("memory", lambda it: it.memory),
    Field("peak_mib", lambda it: it.peak_mib),
    Field("parameters_bytes", lambda it: it.bytes and it.bytes.parameters),
    Field("masters_bytes", lambda it: it.bytes and it.bytes.masters),
    Field("gradients_bytes", lambda it: it.bytes and it.bytes.gradients),
    Field("optimizer_state_bytes", lambda it: it.bytes and it.bytes.optimizer_state),
    Field("casts_bytes", lambda it: it.bytes and it.bytes.casts),
    Field("casts_made", lambda it: it.casts and it.casts.made),
    Field("casts_reused", lambda it: it.casts and it.casts.reused),
    Field("first_loss", lambda it: it.first_loss),
    Field("final_loss", lambda it: it.final_loss),
    Field("loss_noise", lambda it: it.loss_noise),
    Field("loss_scale", lambda it: it.loss_scale),
)
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
    headings = [field.heading for field in FIELDS]
    writer.writerow([*RUN, *headings, *(f"metric:{name}" for name in metrics), *PLACE])
    for record in sweep.records:
        writer.writerow(line(record, metrics, sweep.environment))
    return file.getvalue()


def line(record: Record, metrics: Sequence[str], environment: Environment) -> list[Cell]:
    """Returns the cells of a run."""
    run = [getattr(record, name) for name in RUN]
    place = [getattr(environment, name) for name in PLACE]
    measured = record.measured
    if measured is None:
        return [*run, *[None] * (len(FIELDS) + len(metrics)), *place]
    return [*run, *(field.read(measured) for field in FIELDS), *map(measured.final, metrics), *place]
