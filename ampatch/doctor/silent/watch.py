"""Watches runs for silent faults: the scale in all of the run, operations in its first attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.tape import Tape
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.gradients import Ranges
from ampatch.doctor.silent.looks import FIRST, Looks
from ampatch.doctor.silent.notes import Notes
from ampatch.doctor.silent.scaled import Scaled


class Silent:
    """Holds what is found; `looks` are shown the operations of a tape, those of `window` as well."""

    def __init__(self, clock: Clock, tape: Tape, window: Collection[int] = ()) -> None:
        self._notes = notes = Notes(clock)
        self._scaled, self.ranges = Scaled(clock, notes), Ranges(clock)
        self.looks = Looks(tape, notes, window, self._scaled)

    def found(self) -> tuple[Finding, ...]:
        """Returns what was found, once the run is over."""
        self._scaled.close()
        return self._notes.found()


def plan_window(attempts: Sequence[Attempt], sample: int | None) -> tuple[int, ...]:
    """Returns attempts up to which a traced run goes on for silent faults: not beyond weights that broke."""
    first = attempts[:FIRST]
    last = next((index for index, attempt in enumerate(first) if not attempt.weights), len(first) - 1)
    return tuple(index for index in (last, sample) if index is not None and index >= 0)
