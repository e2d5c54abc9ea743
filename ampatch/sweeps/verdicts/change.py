"""How a row of a sweep changed since another sweep, and what of that is too much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ampatch import AmpValueError
from ampatch.sweeps.records.numbers import ASCII
from ampatch.sweeps.records.record import Outcome, Word
from ampatch.sweeps.records.sweep import Distance, Row, Verdict
from ampatch.sweeps.verdicts.verdict import write_distance


class Fault(Word):
    """What can be worse about a row than it was."""

    MISSING = "missing"
    FAILED = "failed"
    SLOWER = "slower"
    LESS_ACCURATE = "less accurate"
    MORE_MEMORY = "more memory"


@dataclass(frozen=True, slots=True)
class Regression:
    """One thing that got worse, and a sentence about it."""

    fault: Fault
    sentence: str


@dataclass(frozen=True, slots=True)
class Change:
    """A row of both sweeps; `before` is None for a new row, `after` for one that is gone.

    `speed` is above 1 where the row got faster, `memory` below 1 where it needs less. The distances are from
    the row's own values before, in their spreads over the seeds: negative where they got worse.
    """

    name: str
    before: Row | None
    after: Row | None
    speed: float | None
    memory: float | None
    loss: Distance
    metrics: Mapping[str, Distance]
    regressions: tuple[Regression, ...]

    @property
    def obstacle(self) -> str:
        """Says why the row cannot be compared with what it was; empty if it can."""
        old, new = self.before, self.after
        if old is None:
            return "new"
        if old.outcome is not Outcome.FINISHED:
            return "not run before" if was_not_run(old) else "failed before"
        if new is None or new.outcome is not Outcome.FINISHED:
            return "not run now" if was_not_run(new) else "failed now"
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed: parts of the time and memory before, spreads of losses and metrics."""

    slower: float
    tolerance: float
    more_memory: float | None

    def __post_init__(self) -> None:
        for name in ("slower", "tolerance", "more_memory"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                unit = (
                    "a number of spreads such as 2" if name == "tolerance" else "a part such as 0.05 for 5 %"
                )
                raise AmpValueError(f"{name} {value!r}: expected {unit}, not less than 0")


def was_not_run(row: Row | None) -> bool:
    """Says whether a row is not there, or no run of it was let come to its end."""
    return row is None or row.outcome is Outcome.INTERRUPTED


def find_regressions(change: Change, limits: Limits) -> Iterator[Regression]:
    """Yields what got worse in a row; of one that is new or failed before, whether it fails now."""
    name, old, new = change.name, change.before, change.after
    if was_not_run(new):
        if not was_not_run(old):
            yield Regression(
                Fault.MISSING, f"{name} is missing: it {ending_of(old)} before and was not run now"
            )
        return
    if new.verdict is Verdict.FAILED:
        before = ", as before" if old is not None and old.verdict is Verdict.FAILED else ""
        yield Regression(Fault.FAILED, f"{name} failed: {new.reason}{before}")
    if not change.obstacle:
        yield from find_missing(change)
        yield from find_slower(change, limits)
        yield from find_less_accurate(change, limits)
        yield from find_more_memory(change, limits)


def ending_of(row: Row) -> str:
    """Says in a word how a row ended."""
    return "finished" if row.outcome is Outcome.FINISHED else "failed"


def find_missing(change: Change) -> Iterator[Regression]:
    """Yields what was measured before and is not any more."""
    pairs = [("the loss", change.loss), *change.metrics.items()]
    names = [name for name, it in pairs if it.value is None and it.baseline is not None]
    if change.before.step_ms and not change.after.step_ms:
        names.insert(0, "the time of a step")
    for name in names:
        sentence = f"{change.name} is missing {name}, which was measured before"
        yield Regression(Fault.MISSING, sentence)


def find_slower(change: Change, limits: Limits) -> Iterator[Regression]:
    """Yields whether steps take longer than is allowed."""
    old, new = change.before.step_ms, change.after.step_ms
    if old and new and new.median > old.median * (1 + limits.slower):
        part = ASCII.percent(new.median / old.median - 1) if old.median else "much"
        overlap = ", though the quartiles overlap" if new.low <= old.high else ""
        times = f"{ASCII.number(new.median, 4)} ms a step against {ASCII.number(old.median, 4)} before"
        allowed = f"({ASCII.percent(limits.slower)} allowed{overlap})"
        yield Regression(Fault.SLOWER, f"{change.name} is {part} slower: {times} {allowed}")


def find_less_accurate(change: Change, limits: Limits) -> Iterator[Regression]:
    """Yields whether the row diverged, or which losses and metrics are worse than is allowed."""
    if change.after.verdict is Verdict.DIVERGED:
        if change.before.verdict is not Verdict.DIVERGED:
            yield Regression(Fault.LESS_ACCURATE, f"{change.name} diverged: {change.after.reason}")
        return
    for name, it in [("loss", change.loss), *change.metrics.items()]:
        sentence = f"{change.name} is less accurate: {name} "
        if it.spreads is not None and it.spreads < -limits.tolerance:
            far = write_distance(it, f"{ASCII.short(it.baseline)} before")
            yield Regression(
                Fault.LESS_ACCURATE, f"{sentence}{far} ({ASCII.short(limits.tolerance)} allowed)"
            )
        elif is_ruined(it):
            was = f"is {ASCII.number(it.value)}, and was {ASCII.short(it.baseline)} before"
            yield Regression(Fault.LESS_ACCURATE, sentence + was)


def is_ruined(distance: Distance) -> bool:
    """Says whether a value was finite before and is not any more."""
    value, baseline = distance.value, distance.baseline
    return None not in (value, baseline) and math.isfinite(baseline) and not math.isfinite(value)


def find_more_memory(change: Change, limits: Limits) -> Iterator[Regression]:
    """Yields whether the row needs more memory than is allowed, if there is a limit."""
    if limits.more_memory is None or change.memory is None or change.memory <= 1 + limits.more_memory:
        return
    yield Regression(
        Fault.MORE_MEMORY,
        f"{change.name} needs {ASCII.percent(change.memory - 1)} more memory: "
        f"{ASCII.number(change.after.peak_mib)} against {ASCII.number(change.before.peak_mib)} MiB before "
        f"({ASCII.percent(limits.more_memory)} allowed)",
    )
