"""The file sweep.csv: a line for each run of a sweep, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ampatch.sweeps.columns import COLUMNS
from ampatch.sweeps.records.record import RunRecord
from ampatch.sweeps.records.sweep import Environment, Sweep

Cell = str | int | float | None

RUN = ("row", "seed", "repeat", "outcome", "seconds", "cause")
PLACE = ("torch", "device")
# Units are in the keys: `_ms` milliseconds a step, `_mib` MiB.
MEASURED = tuple(sorted((it for it in COLUMNS if it.csv), key=lambda it: it.csv))


def to_csv(sweep: Sweep) -> str:
    """Writes one line a run: which it was, how it ended, what it measured, the last value of each metric.

    A cell is empty where nothing was measured. Numbers are written so that they are read back exactly; those
    that are not finite are nan, inf and -inf.
    """
    measured = [record.measured for record in sweep.records if record.measured]
    metrics = list(dict.fromkeys(name for each in measured for name in each.metrics))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*RUN, *(it.key for it in MEASURED), *(f"metric:{name}" for name in metrics), *PLACE])
    for record in sweep.records:
        writer.writerow(line(record, metrics, sweep.environment))
    return file.getvalue()


def line(record: RunRecord, metrics: Sequence[str], environment: Environment) -> list[Cell]:
    """Returns the cells of a run."""
    run = [getattr(record, name) for name in RUN]
    place = [getattr(environment, name) for name in PLACE]
    measured = record.measured
    if measured is None:
        return [*run, *[None] * (len(MEASURED) + len(metrics)), *place]
    return [*run, *(it.of_run(measured) for it in MEASURED), *map(measured.final, metrics), *place]
