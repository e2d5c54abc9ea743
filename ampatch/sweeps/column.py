"""A column of a sweep, as the table in `columns` describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.record import Measured, Spread
from ampatch.sweeps.records.sweep import Sweep, SweepRow
from ampatch.tools.numbers import Alphabet

RESULTS = "Results"  # the first table of the page


@dataclass(frozen=True, slots=True)
class Shown:
    """How the terminal or the page shows a column; `table`, `small` and `bar` are for the page.

    `small` writes what stands below a number in small letters. `bar` names two columns: a bar has the length
    of the number in the first, and fills the cell for the largest in the second.
    """

    heading: str
    write: Callable[[Alphabet, float | None], str] = Alphabet.number
    table: str = RESULTS
    small: Callable[[SweepRow], str] | None = None
    bar: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """How much larger a number may be in a later sweep: the option that says so, and what is said beyond it.

    A comparison shows the `ratio` of the two numbers (the inverse one if `is_speed`), and both numbers if
    they have a `unit`. `missing` is the name of a number that must not be missing in the later sweep.
    """

    option: str
    default: float | None
    meaning: str
    fault: str
    sentence: str
    ratio: str
    unit: str = ""
    is_speed: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A quantity: its name in files, where its numbers come from, and how each output shows it, if it does.

    `run` is where it is in `Measured`, if not at the key. `csv` is its place in sweep.csv; a new column takes
    the next, since programs may count. `pool` makes one number for a row of what its runs have there, or at
    `pooled`; `SweepRow` and sweep.json keep it if there is a field of this key. `row` gets it from a row in
    another way. `said` explains the column below the table of the terminal.
    """

    key: str
    csv: int | None = None
    pool: Callable[[list], object] | None = None
    run: str | None = None
    pooled: str | None = None
    row: Callable[[SweepRow], float | None] | None = None
    terminal: Shown | None = None
    page: Shown | None = None
    said: str = ""
    limit: Limit | None = None

    @property
    def is_in_rows(self) -> bool:
        """Says whether rows keep it, and JSON with them."""
        return self.key in SweepRow.__dataclass_fields__

    def of_run(self, measured: Measured) -> str | float | None:
        """Returns what a run measured, or what its numbers come to."""
        if self.pooled is not None:
            return self.of_runs([measured])
        return number_of(value_at(measured, self.key if self.run is None else self.run))

    def of_runs(self, runs: Sequence[Measured]) -> object:
        """Makes one value of what runs measured, None if none did."""
        path = next(it for it in (self.pooled, self.run, self.key) if it is not None)
        values = [value for it in runs if (value := value_at(it, path)) is not None]
        return self.pool(values) if values else None

    def of_row(self, row: SweepRow | None, sweep: Sweep | None = None) -> float | None:
        """Returns the number of a row, None if there is none; what rows do not keep is in the `sweep`."""
        if row is None or self.row is not None:
            return row and self.row(row)
        return number_of(getattr(row, self.key) if self.is_in_rows else self.of_runs(sweep.measured(row)))


def value_at(whole: object, path: str) -> object:
    """Returns the part of an object at a path of names, None if a part of it is not there."""
    for name in filter(None, path.split(".")):
        whole = None if whole is None else getattr(whole, name)
    return whole


def number_of(value: object) -> str | float | None:
    """Returns the median of a spread, the value of a distance, and the length of what is listed."""
    if isinstance(value, Spread):
        return value.median
    return len(value) if isinstance(value, tuple) else value
