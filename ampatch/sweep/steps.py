"""When the steps of a training run happened, and how many there were."""

import statistics
from array import array
from collections import defaultdict
from pathlib import Path

WARMUP_STEPS = 5
PROGRESS_SECONDS = 0.25


class StepTimes:
    """Times between successive steps of the same optimizer."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._intervals: dict[int, array[float]] = defaultdict(lambda: array("d"))

    def add(self, optimizer: object, now: float) -> None:
        """Takes the time of a step, in seconds."""
        key = id(optimizer)
        if key in self._last:
            self._intervals[key].append(now - self._last[key])
        self._last[key] = now

    def forget_optimizers(self) -> None:
        """Makes the next step of each optimizer a first one: ids are given out again."""
        self._last.clear()

    def median_ms(self) -> float | None:
        """Returns the median in milliseconds without the warm-up; None if no two steps followed."""
        kept = [time for times in self._intervals.values() for time in after_warmup(times)]
        return statistics.median(kept) * 1000 if kept else None


def after_warmup(intervals: "array[float]") -> "array[float]":
    """Leaves out the first intervals, but never more than half of them."""
    return intervals[min(WARMUP_STEPS, len(intervals) // 2) :]


class StepCounter:
    """Counts steps, and writes the count to a file a few times a second at the most."""

    def __init__(self, path: Path) -> None:
        self.steps = 0
        self._path = path
        self._due = 0.0

    def add(self, now: float) -> None:
        """Counts one step; `now` is in seconds."""
        self.steps += 1
        if now >= self._due:
            self._due = now + PROGRESS_SECONDS
            self._write()

    def _write(self) -> None:
        # Renamed into place: the parent must not read a file that is half written.
        part = self._path.with_suffix(".part")
        part.write_text(str(self.steps))
        part.replace(self._path)


def read_count(path: Path) -> int:
    """Reads what a `StepCounter` wrote last; 0 where there is nothing yet."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
