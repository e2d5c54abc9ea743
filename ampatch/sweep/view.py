"""Shows a sweep in the terminal: a progress bar while it runs, a table when it is over."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ampatch.sweep.record import Measured, Outcome, Record
from ampatch.sweep.recorder import LAST_LOSSES
from ampatch.sweep.steps import WARMUP_STEPS

# ASCII, since a pipe may go to a terminal or a file of any encoding.
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One measured column: its heading, and how a value is read and written."""

    heading: str
    write: Callable[[Measured], str]


COLUMNS = (
    Column("ms a\nstep", lambda it: fixed(it.step_ms, 2)),
    Column("peak\nMiB", lambda it: fixed(it.peak_mib, 0)),
    Column("final\nloss", lambda it: significant(it.final_loss)),
    Column("test\naccuracy", lambda it: fixed(it.metrics.get("accuracy"), 4)),
    Column("skipped\nsteps", lambda it: str(it.skipped_steps)),
    Column("loss\nscale", lambda it: scale(it.loss_scale)),
)


class Bar:
    """The progress of a sweep: levels done, and the steps that the present one has made."""

    def __init__(self, progress: Progress, names: Sequence[str]) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=len(names), steps=0)

    def start(self, name: str) -> None:
        """Shows which run is on."""
        self._progress.update(self._task, description=name, steps=0)

    def show_steps(self, steps: int) -> None:
        """Shows how many steps the run has made."""
        self._progress.update(self._task, steps=steps)

    def finish(self) -> None:
        """Counts the run as done."""
        self._progress.advance(self._task)


@contextmanager
def progress_bar(console: Console, names: Sequence[str]) -> Iterator[Bar]:
    """Shows a bar while the block runs; it leaves nothing behind."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} levels"),
        TextColumn("step {task.fields[steps]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, names)


def show(console: Console, title: str, records: Sequence[Record]) -> None:
    """Prints the table, and under it a line for each run that failed."""
    console.print(build_table(title, records))
    for record in records:
        if record.failed:
            console.print(explain(record), markup=False, highlight=False, soft_wrap=True)


def build_table(title: str, records: Sequence[Record]) -> Table:
    """Builds the table, one row a run; it fits into 80 columns."""
    layout = {"box": SIMPLE, "padding": (0, 1, 0, 0), "caption_justify": "left"}
    table = Table(title=title, caption=caption(records), **layout)
    table.add_column("level", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.heading, justify="right", no_wrap=True)
    table.add_column("accuracy\nvs O0", justify="right", no_wrap=True)
    for record in records:
        table.add_row(record.name, *cells(record), accuracy_difference(record, records))
    return table


def cells(record: Record) -> list[str]:
    """Writes the measured columns of a run; one that failed says so in the first of them."""
    if record.failed or record.measured is None:
        return [record.outcome.value, *[NOTHING] * (len(COLUMNS) - 1)]
    return [column.write(record.measured) for column in COLUMNS]


def accuracy_difference(record: Record, records: Iterable[Record]) -> str:
    """Writes by how much the accuracy of a run is above that of O0; a dash for O0 itself."""
    baseline = next((it.accuracy for it in records if it.name == "O0" and not it.failed), None)
    if record.name == "O0" or record.failed or record.accuracy is None or baseline is None:
        return NOTHING
    return f"{record.accuracy - baseline:+.4f}"


def caption(records: Iterable[Record]) -> str:
    """Says how the columns were measured."""
    kinds = sorted({record.measured.memory for record in records if record.measured})
    return (
        f"ms a step: median, without the first {WARMUP_STEPS} steps. "
        f"peak MiB: {' or '.join(kinds) or 'resident'} memory. "
        f"final loss: mean of the last {LAST_LOSSES} losses. loss scale: the last one."
    )


def explain(record: Record) -> str:
    """Says in one line how a run failed, and where its log is."""
    after = f" after {record.seconds:.0f} s" if record.outcome is Outcome.TIMED_OUT else ""
    steps = record.measured.steps if record.measured else 0
    made = f" (step {steps})" if steps else ""
    return f"{record.name} {record.outcome}{after}{made}: {record.cause} (log: {record.log})"


def fixed(value: float | None, digits: int) -> str:
    """Writes a number with so many digits after the point.

    >>> fixed(1.005, 1), fixed(None, 1)
    ('1.0', '-')
    """
    return NOTHING if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Writes three significant digits.

    >>> significant(0.0012345), significant(float("nan"))
    ('0.00123', 'nan')
    """
    return NOTHING if value is None else f"{value:.3g}"


def scale(value: float | None) -> str:
    """Writes a loss scale: in full from 1 up, which is where nearly all are.

    >>> scale(16777216.0), scale(0.5), scale(2.0**-20)
    ('16777216', '0.5', '9.54e-07')
    """
    whole = value is not None and value >= 1 and math.isfinite(value)
    return fixed(value, 0) if whole else significant(value)
