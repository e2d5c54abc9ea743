"""When the steps of a training run happened, and how long they took."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence

import torch

from ampatch.sweeps.judge.statistics import quartiles

LONGEST_ROUND = 20  # steps of the optimizer that steps most, for one of that which steps least
BATCH = 64  # steps that are looked at together: one at a time costs ten times as much, in a cold cache

Mark = object  # a point in time, which only its clock can read


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


class StepTimes:
    """Times of steps, in milliseconds.

    A step ends where an optimizer steps that has stepped in it before; its time is that since the step of
    the same optimizer before. The first one has no beginning, and no time.
    """

    def __init__(self, clock: HostClock) -> None:
        self.steps = 0
        self._clock = clock
        self._start: Mark | None = None
        self._stepped: set[int] = set()
        self._waiting: deque[tuple[Mark, Mark]] = deque()
        self._counts: dict[int, int] = {}  # steps of each optimizer
        self._milliseconds = array("d")

    def end_step(self, optimizer: object) -> bool:
        """Notes the step of an optimizer; returns whether a step of the run ended."""
        now, key = self._clock.mark(), id(optimizer)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._stepped and key not in self._stepped:
            self._stepped.add(key)
            return False
        self.steps += 1
        start, self._start, self._stepped = self._start, now, {key}
        if start is not None:
            self._waiting.append((start, now))
            if len(self._waiting) >= BATCH:
                self._settle()
        return True

    def forget_optimizers(self) -> None:
        """Makes the next step a first one: ids are given out again."""
        self._stepped.clear()
        self._start = None

    def _settle(self) -> None:
        while self._waiting and self._clock.is_over(self._waiting[0][1]):
            self._milliseconds.append(self._clock.milliseconds(*self._waiting.popleft()))

    def fields(self, warmup: int) -> dict[str, float | int]:
        """Sums up the times without the warm-up: fields of a `Run`; none if there are no times."""
        self._clock.synchronize()
        self._settle()
        values = self._in_rounds(after_warmup(self._milliseconds, warmup))
        if not values:
            return {}
        low, median, high = quartiles(values)
        return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, "timed": len(values)}

    def _in_rounds(self, values: Sequence[float]) -> Sequence[float]:
        """Averages over rounds of optimizers, if some step more often.

        With five steps of a critic for one of the generator the median step would be one without the latter.
        """
        counts = self._counts.values()
        length = round(max(counts) / min(counts)) if counts else 1
        if not 1 < length <= min(LONGEST_ROUND, len(values)):
            return values
        ends = range(length, len(values) + 1, length)
        return [sum(values[end - length : end]) / length for end in ends]


def after_warmup(values: Sequence[float], warmup: int) -> Sequence[float]:
    """Leaves out the first values; of a run that is no longer than the warm-up, the first half.

    >>> after_warmup([9, 9, 9, 1], 3), after_warmup([9, 1], 5)
    ([1], [1])
    """
    return values[warmup if warmup < len(values) else len(values) // 2 :]
