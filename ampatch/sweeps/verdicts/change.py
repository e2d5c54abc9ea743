"""How a row of a sweep changed since another sweep, and what of that is too much."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampatch.sweeps.faults import validate_numbers
from ampatch.sweeps.records.record import Ending
from ampatch.sweeps.records.sweep import Distance, SweepRow, Verdict
from ampatch.sweeps.verdicts.summary import divide, step_ms
from ampatch.sweeps.verdicts.verdict import write_distance
from ampatch.tools.numbers import ASCII

PART = (0, "a fraction such as 0.05 for 5 %, not less than 0")
LEAST = {
    "slower": PART,
    "tolerance": (0, "a number of spreads such as 2, not less than 0"),
    "more_memory": PART,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed: parts of the time and memory before, spreads of losses and metrics."""

    slower: float
    tolerance: float
    more_memory: float | None

    def __post_init__(self) -> None:
        validate_numbers(self, LEAST, most=sys.float_info.max)


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

    @property
    def speed(self) -> float | None:
        """Returns a ratio that is above 1 where the row got faster."""
        return divide(step_ms(self.before), step_ms(self.after))

    @property
    def memory(self) -> float | None:
        """Returns a ratio that is below 1 where the row needs less."""
        old, new = self.before, self.after
        return divide(new and new.peak_mib, old and old.peak_mib)

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
        yield from find_slower(change)
        yield from find_less_accurate(change)
        yield from find_more_memory(change)


def find_missing(change: RowChange) -> Iterator[Regression]:
    """Yields what was measured before and is not any more."""
    pairs = [("the loss", change.loss), *change.metrics.items()]
    names = [name for name, it in pairs if it.value is None and it.baseline is not None]
    if change.before.step_ms and not change.after.step_ms:
        names.insert(0, "the time of a step")
    for name in names:
        yield Regression("missing", f"{change.name} is missing {name}, which was measured before")


def find_slower(change: RowChange) -> Iterator[Regression]:
    """Yields whether steps take longer than is allowed."""
    old, new, limit = change.before.step_ms, change.after.step_ms, change.limits.slower
    if old and new and new.median > old.median * (1 + limit):
        part = ASCII.percent(new.median / old.median - 1) if old.median else "much"
        overlap = ", though the quartiles overlap" if new.low <= old.high else ""
        times = f"{ASCII.number(new.median, 4)} ms a step against {ASCII.number(old.median, 4)} before"
        allowed = f"({ASCII.percent(limit)} allowed{overlap})"
        yield Regression("slower", f"{change.name} is {part} slower: {times} {allowed}")


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


def find_more_memory(change: RowChange) -> Iterator[Regression]:
    """Yields whether the row needs more memory than is allowed, if there is a limit."""
    limit = change.limits.more_memory
    if limit is None or change.memory is None or change.memory <= 1 + limit:
        return
    yield Regression(
        "more memory",
        f"{change.name} needs {ASCII.percent(change.memory - 1)} more memory: "
        f"{ASCII.number(change.after.peak_mib)} against {ASCII.number(change.before.peak_mib)} MiB before "
        f"({ASCII.percent(limit)} allowed)",
    )
