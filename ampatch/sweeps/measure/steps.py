"""When the steps of a training run happened, how long their parts took, and how many there were."""

from __future__ import annotations

import contextlib
import statistics
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from ampatch.sweeps.records.record import Spread

PROGRESS_SECONDS = 0.25
LONGEST_ROUND = 20  # steps of the optimizer that steps most, for one of that which steps least
PARTS = ("forward", "backward", "update")

# The parts of a step are timed in so many steps of so many: in a step of 3 ms their marks take a percent.
TIMED, PERIOD = 16, 64
BATCH = 64  # steps that are looked at together: one at a time costs ten times as much, in a cold cache

Mark = object  # a point in time, which only its clock can read
Interval = tuple[Mark, Mark]


class HostClock:
    """The clock of a CPU, where an operation is over when it returns; marks are seconds."""

    def __init__(self) -> None:
        self.mark = time.perf_counter  # a call less than a method

    def is_over(self, mark: Mark) -> bool:
        """Whether the device has come to a mark: always."""
        return True

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Returns the time between two marks that are over."""
        return (end - start) * 1000

    def synchronize(self) -> None:
        """Has nothing to wait for."""


class DeviceClock(HostClock):
    """Marks are CUDA events in the current stream: they cost the loop no host sync."""

    def __init__(self) -> None:
        self.mark = self._record

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come to the event."""
        return mark.query()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the time between two events, as the device took it."""
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()


class StepMarks:
    """The marks of one step, until somebody looks at them; its parts are only timed if it `has_parts`."""

    __slots__ = ("backward", "end", "forward", "has_parts", "start", "update")

    def __init__(self, start: Mark | None, has_parts: bool) -> None:
        self.start = start
        self.has_parts = has_parts
        self.end: Mark | None = None
        self.forward: list[Interval] = []
        self.backward: list[Interval] = []
        self.update: list[Interval] = []


class StepTimes:
    """Times of steps and of their parts, in milliseconds.

    A step ends where an optimizer steps that has stepped in it before; its time is that since the step of
    the same optimizer before. The first one has no beginning, and no time.
    """

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self.steps = 0
        self.present = StepMarks(None, True)
        self._stepped: set[int] = set()
        self._waiting: deque[StepMarks] = deque()
        self._counts: dict[int, int] = {}  # steps of each optimizer
        self._milliseconds = array("d")
        self._parts = {part: array("d") for part in PARTS}

    def end_step(self, optimizer: object, begin: Mark | None) -> bool:
        """Notes the step of an optimizer that began at `begin`; returns whether a step of the run ended."""
        now, key = self.clock.mark(), id(optimizer)
        present, stepped = self.present, self._stepped
        self._counts[key] = self._counts.get(key, 0) + 1
        if begin is not None:
            present.update.append((begin, now))
        if stepped and key not in stepped:
            stepped.add(key)
            return False
        self.steps += 1
        self.present = StepMarks(now, self.steps % PERIOD < TIMED)
        self._stepped = {key}
        if present.start is not None:
            present.end = now
            self._waiting.append(present)
            if len(self._waiting) >= BATCH:
                self._settle()
        return True

    def forget_optimizers(self) -> None:
        """Makes the next step a first one: ids are given out again."""
        self._stepped.clear()
        self.present = StepMarks(None, self.steps % PERIOD < TIMED)

    def _settle(self) -> None:
        measure = self.clock.milliseconds
        while self._waiting and self.clock.is_over(self._waiting[0].end):
            step = self._waiting.popleft()
            self._milliseconds.append(measure(step.start, step.end))
            for part, values in self._parts.items() if step.has_parts else ():
                values.append(sum(measure(start, end) for start, end in getattr(step, part)))

    def spread(self, warmup: int) -> Spread | None:
        """Sums up the times without the warm-up; None if no two steps followed each other."""
        self.clock.synchronize()
        self._settle()
        return spread_of(self._in_rounds(self._milliseconds, warmup))

    def spread_of_part(self, part: str, warmup: int) -> Spread | None:
        """Sums up the times of a part of the steps, after `spread`; None if it was never seen."""
        values = self._in_rounds(self._parts[part], count_timed(warmup))
        return spread_of(values) if any(values) else None

    def _in_rounds(self, values: Sequence[float], warmup: int) -> Sequence[float]:
        """Leaves out the warm-up, and averages over rounds of optimizers, if some step more often.

        With five steps of a critic for one of the generator the median step would be one without the latter.
        """
        values = after_warmup(values, warmup)
        counts = self._counts.values()
        length = round(max(counts) / min(counts)) if counts else 1
        if not 1 < length <= min(LONGEST_ROUND, len(values)):
            return values
        ends = range(length, len(values) + 1, length)
        return [sum(values[end - length : end]) / length for end in ends]


def count_timed(steps: int) -> int:
    """Returns how many of so many steps have their parts timed.

    >>> count_timed(5), count_timed(40), count_timed(70)
    (5, 16, 22)
    """
    return steps // PERIOD * TIMED + min(steps % PERIOD, TIMED)


def after_warmup(values: Sequence[float], warmup: int) -> Sequence[float]:
    """Leaves out the first values; of a run that is no longer than the warm-up, the first half.

    >>> after_warmup([9, 9, 9, 1], 3), after_warmup([9, 1], 5)
    ([1], [1])
    """
    return values[warmup if warmup < len(values) else len(values) // 2 :]


def spread_of(values: Sequence[float]) -> Spread | None:
    """Returns the median and the quartiles; None of no values.

    >>> spread_of([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0, count=5)
    """
    if not values:
        return None
    median = statistics.median(values)
    if len(values) == 1:
        return Spread(median, median, median, 1)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


class StepCounter:
    """Writes a count of steps to a file, a few times a second at the most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = 0.0

    def show(self, steps: int, now: float) -> None:
        """Writes the count if it is time; `now` is in seconds."""
        if now < self._due:
            return
        self._due = now + PROGRESS_SECONDS
        # Renamed into place: the parent must not read a file that is half written. A disk that is full is no
        # reason for a script to end.
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(str(steps))
            part.replace(self._path)


def read_count(path: Path) -> int:
    """Reads what a `StepCounter` wrote last; 0 where there is nothing yet."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
