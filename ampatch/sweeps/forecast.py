"""Says how long the rest of a sweep takes, from its runs so far and the steps of the present one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from ampatch.sweeps.records.record import RunRecord


class Forecast:
    """How many seconds the runs of a sweep take.

    For a row that has run it expects the time of its own runs, also if they failed at once; but of the time
    to the first step no more than is typical, since the first run may download data or fill caches. For a row
    that has not run it expects the time of the typical row that finished. The present run counts by its
    speed, once the number of its steps is known: as many as the run before it made, or `limit`.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = limit
        # Of each run its seconds, and those to the first step.
        self._runs: dict[str, list[tuple[float, float]]] = {}
        self._failed: set[str] = set()
        self._row = ""
        self._began = 0.0
        self._marks: list[tuple[float, int]] = []  # when steps of the present run were seen first, and last

    def start(self, row: str) -> None:
        """Notes that a run of this row has begun."""
        self._row, self._began = row, self._clock()
        self._marks.clear()

    def note_steps(self, steps: int) -> None:
        """Notes how many steps the present run has made."""
        if steps and (not self._marks or steps > self._marks[-1][1]):
            self._marks[1:] = [(self._clock(), steps)]

    def finish(self, record: RunRecord) -> None:
        """Takes what came of the present run."""
        self._row = ""
        start = self._marks[0][0] - self._began if self._marks else 0.0
        self._runs.setdefault(record.row, []).append((record.seconds, start))
        if record.failed:
            self._failed.add(record.row)
        elif record.measured:
            self._steps = record.measured.steps

    def left(self, ahead: Iterable[str]) -> float | None:
        """Returns the seconds until the present run and those of the rows ahead are over, None if unknown."""
        takes = self._typical()
        speed = self._by_speed()
        if speed is not None:
            takes.setdefault(self._row, speed)
        finished = [seconds for row, seconds in takes.items() if row not in self._failed]
        if not finished:
            return None
        other = statistics.median_low(finished)
        rest = sum(takes.get(row, other) for row in ahead)
        if not self._row:
            return rest
        return rest + max(takes.get(self._row, other) - (self._clock() - self._began), 0.0)

    def _typical(self) -> dict[str, float]:
        """Returns what a run of each row takes that has run."""
        starts = [start for runs in self._runs.values() for _, start in runs if start]
        usual = statistics.median_low(starts) if starts else 0.0
        return {
            row: statistics.median_low(seconds - max(start - usual, 0.0) for seconds, start in runs)
            for row, runs in self._runs.items()
        }

    def _by_speed(self) -> float | None:
        """Returns what the present run takes if it goes on as it did."""
        if len(self._marks) < 2 or not self._steps:
            return None
        (first, begun), (now, made) = self._marks
        return now - self._began + (now - first) / (made - begun) * max(self._steps - made, 0)
