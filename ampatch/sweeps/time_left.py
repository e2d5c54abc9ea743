"""Estimates how long a sweep will go on, from the runs that finished and the steps of the present one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Past:
    """A run that finished: its row, its seconds, and how many steps it made."""

    row: str
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class Present:
    """The run that is on: its row, the seconds it has taken, and the steps it has made."""

    row: str
    seconds: float
    steps: int


def estimate_seconds(
    past: Sequence[Past],
    present: Present,
    rows_to_come: Sequence[str],
    steps: int | None = None,
    timeout: float | None = None,
) -> float | None:
    """Returns the seconds until the last run is over, None while nothing is known.

    A run takes what its row took before, at the median; in a row's first run, what its steps up to now
    took, for as many steps as earlier runs made (before there is one, for `steps`, the limit); else what the
    rows known took on average. No run takes more than `timeout`.

    >>> estimate_seconds([Past("O0", 60, 100)], Present("O1", 10, 50), ["O2", "O2"])
    90.0
    """
    bound = float("inf") if timeout is None else timeout
    known = seconds_by_row(past)
    whole = known.get(present.row) or extrapolate(present, expect_steps(past, steps))
    if whole is not None:
        known[present.row] = min(whole, bound)
    if not known:
        return None
    usual = statistics.mean(known.values())
    ahead = sum(known.get(row, usual) for row in rows_to_come)
    return max(known.get(present.row, usual) - present.seconds, 0.0) + ahead


def seconds_by_row(past: Sequence[Past]) -> dict[str, float]:
    """Returns what the runs of each row took, at the median."""
    rows = dict.fromkeys(run.row for run in past)
    return {row: statistics.median(run.seconds for run in past if run.row == row) for row in rows}


def expect_steps(past: Sequence[Past], limit: int | None) -> int | None:
    """Returns how many steps a run makes: as many as others did, before there is one the limit."""
    return max((run.steps for run in past), default=limit)


def extrapolate(present: Present, total: int | None) -> float | None:
    """Returns what a run takes whose steps go on as they did, None before the first and of no known total."""
    if not present.steps or not total:
        return None
    return present.seconds * max(total / present.steps, 1.0)
