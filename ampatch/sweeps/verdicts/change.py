"""How a row of a sweep changed since another sweep, and what of that is too much."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ampatch.sweeps.column import Column
from ampatch.sweeps.columns import LIMITED, divide
from ampatch.sweeps.faults import validate_numbers
from ampatch.sweeps.records.record import Ending, Spread
from ampatch.sweeps.records.sweep import Distance, SweepRow, Verdict
from ampatch.sweeps.verdicts.verdict import write_distance
from ampatch.tools.numbers import ASCII

SPREADS = (0, "a number of spreads such as 2, not less than 0")
PART = (0, "a fraction such as 0.05 for 5 %, not less than 0")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much worse a row may be: spreads of losses and metrics, and parts of other numbers, by option."""

    tolerance: float
    parts: Mapping[str, float | None]

    def __post_init__(self) -> None:
        least = {"tolerance": SPREADS} | dict.fromkeys(self.parts, PART)
        validate_numbers({"tolerance": self.tolerance} | self.parts, least, most=sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Regression:
    """One thing that got worse: in a word or two, and in a sentence."""

    fault: str
    sentence: str


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row of both sweeps; `before` is None for a new row, `after` for one that is gone.

    The distances are from the row's own values before, in their spreads over the seeds: negative where they
    got worse.
    """

    name: str
    before: SweepRow | None
    after: SweepRow | None
    loss: Distance
    metrics: Mapping[str, Distance]
    limits: Limits

    def sides(self, column: Column) -> tuple[float | None, float | None]:
        """Returns the number of a column before and after."""
        return column.of_row(self.before), column.of_row(self.after)

    def ratio(self, column: Column) -> float | None:
        """Returns how many times the number before it is now; of a time, how many times as fast."""
        old, new = self.sides(column)
        return divide(old, new) if column.limit.is_speed else divide(new, old)

    @property
    def obstacle(self) -> str:
        """Says why the row cannot be compared with what it was; empty if it can."""
        if self.before is None:
            return "new"
        for row, when in ((self.before, "before"), (self.after, "now")):
            if was_not_run(row):
                return f"not run {when}"
            if row.outcome is not Ending.FINISHED:
                return f"failed {when}"
        return ""

    @property
    def obstacle_to_accuracy(self) -> str:
        """Says why the accuracy of a row that finished twice cannot be compared; empty if it can."""
        if self.obstacle:
            return ""
        if self.before.verdict is Verdict.DIVERGED:
            return "diverged before"
        known = [it for it in (self.loss, *self.metrics.values()) if it.baseline is not None]
        return "" if known else "reported neither loss nor metric before"

    @property
    def regressions(self) -> tuple[Regression, ...]:
        """Returns what got worse; of a row that is new or failed before, whether it fails now."""
        return tuple(find_regressions(self))


def was_not_run(row: SweepRow | None) -> bool:
    """Says whether a row is not there, or no run of it was let come to its end."""
    return row is None or row.outcome is Ending.INTERRUPTED


def find_regressions(change: RowChange) -> Iterator[Regression]:
    """Yields what got worse in a row."""
    name, old, new = change.name, change.before, change.after
    if was_not_run(new):
        if not was_not_run(old):
            ending = "finished" if old.outcome is Ending.FINISHED else "failed"
            yield Regression("missing", f"{name} is missing: it {ending} before and was not run now")
        return
    if new.verdict is Verdict.FAILED:
        before = ", as before" if old is not None and old.verdict is Verdict.FAILED else ""
        yield Regression("failed", f"{name} failed: {new.reason}{before}")
    if not change.obstacle:
        yield from find_missing(change)
        yield from find_larger(change, LIMITED[:1])  # the time comes first
        yield from find_less_accurate(change)
        yield from find_larger(change, LIMITED[1:])


def find_missing(change: RowChange) -> Iterator[Regression]:
    """Yields what was measured before and is not any more."""
    pairs = [("the loss", change.loss), *change.metrics.items()]
    names = [name for name, it in pairs if it.value is None and it.baseline is not None]
    sides = [(it.limit.missing, *change.sides(it)) for it in LIMITED]
    gone = [name for name, old, new in sides if name and old is not None and new is None]
    for name in [*gone, *names]:
        yield Regression("missing", f"{change.name} is missing {name}, which was measured before")


def find_larger(change: RowChange, columns: Iterable[Column]) -> Iterator[Regression]:
    """Yields which numbers are larger than is allowed."""
    for column in columns:
        limit, (old, new) = column.limit, change.sides(column)
        most = change.limits.parts[limit.option]
        if None in (old, new, most) or new <= old * (1 + most):
            continue
        spreads = [getattr(row, column.key) for row in (change.before, change.after)]
        is_close = isinstance(spreads[0], Spread) and spreads[1].low <= spreads[0].high
        overlap = ", though the quartiles overlap" if is_close else ""
        part = ASCII.percent(new / old - 1) if old else "much"
        old, new = (column.terminal.write(ASCII, it) for it in (old, new))
        said = limit.sentence.format(part=part, old=old, new=new)
        yield Regression(limit.fault, f"{change.name} {said} ({ASCII.percent(most)} allowed{overlap})")


def find_less_accurate(change: RowChange) -> Iterator[Regression]:
    """Yields whether the row diverged, or which losses and metrics are worse than is allowed."""
    if change.after.verdict is Verdict.DIVERGED:
        if change.before.verdict is not Verdict.DIVERGED:
            yield Regression("less accurate", f"{change.name} diverged: {change.after.reason}")
        return
    tolerance = change.limits.tolerance
    for name, it in [("loss", change.loss), *change.metrics.items()]:
        if it.spreads is not None and it.spreads < -tolerance:
            far = write_distance(it, f"{ASCII.short(it.baseline)} before")
            said = f"{far} ({ASCII.short(tolerance)} allowed)"
        elif None not in (it.value, it.baseline) and math.isfinite(it.baseline) > math.isfinite(it.value):
            said = f"is {ASCII.number(it.value)}, and was {ASCII.short(it.baseline)} before"
        else:
            continue
        yield Regression("less accurate", f"{change.name} is less accurate: {name} {said}")
