"""Judges one update of a loss scale after the other: which alarms it is the reason of."""

from __future__ import annotations

import math
from collections import deque

from ampatch.levels.loss_scale import Alarms
from ampatch.watching.alarms.history import ScaleUpdate

SEARCH_ENDS = 128.0  # no search of a scale goes below


class Judge:
    """Says which alarms the updates of one loss raise; see `Alarms` for the rules.

    The first overflows, until a step is clean, are the scale's search, and so is one that follows a growth at
    once: where the scale was good is not known yet. A scale that somebody raised is searched for again.
    """

    def __init__(self, limits: Alarms) -> None:
        self._limits = limits
        self._is_searching = True
        self._has_grown = False  # at the step before
        self._scale = math.inf  # that the step before left
        self._in_a_row, self._fell_in_row = 0, False  # skipped steps, and whether the scale fell at one
        self._falls: deque[int] = deque(maxlen=limits.falls or 1)  # the steps of the latest, one a row
        self._is_low = False
        self.is_calm = False  # whether a clean step at the same scale would change nothing here
        self._held: dict[str, int] = {}  # the step at which each kind last had a reason

    def take(self, update: ScaleUpdate, floor: float = 0.0) -> tuple[str, ...]:
        """Takes the next update, and returns the kinds of alarms to raise.

        `floor` is the least that the scale may become.
        """
        is_searching = self._is_searching or update.scale > self._scale
        is_search = is_searching or self._has_grown
        self._is_searching = is_searching and update.skipped and update.next_scale >= SEARCH_ENDS
        self._has_grown = update.next_scale > update.scale
        self._scale = update.next_scale
        self.is_calm = False
        if not update.skipped:
            self._in_a_row, self._fell_in_row = 0, False
            if update.loss_is_finite is not False and not self._is_low:
                self.is_calm = not self._has_grown
                return ()
        elif not is_search:
            self._in_a_row += 1
            if update.next_scale < update.scale and not self._fell_in_row:
                self._fell_in_row = True
                self._falls.append(update.step)
        reasons = self._find_reasons(update, is_search, floor)
        return tuple([kind for kind, holds in reasons.items() if holds and self._is_new(kind, update.step)])

    def _find_reasons(self, update: ScaleUpdate, is_search: bool, floor: float) -> dict[str, bool]:
        """Says of each kind whether there is a reason for it."""
        limits, skipped, after = self._limits, update.skipped, update.next_scale
        self._is_low = (self._is_low or skipped) and after < (limits.scale_below or 0.0)
        has_fallen = len(self._falls) == limits.falls and update.step - self._falls[0] < limits.within
        is_least = after <= floor and (not is_search or update.scale <= floor)
        return {
            "loss": limits.loss and update.loss_is_finite is False,
            "skipped": limits.skipped is not None and self._in_a_row >= limits.skipped,
            "falls": skipped and has_fallen,
            "low": self._is_low,
            "minimum": limits.minimum and skipped and is_least,
        }

    def _is_new(self, kind: str, step: int) -> bool:
        before = self._held.get(kind)
        self._held[kind] = step
        return before is None or step - before > self._limits.within
