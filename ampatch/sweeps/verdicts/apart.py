"""Which rows may be recommended, and which of them are told apart by their times."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweeps.records.sweep import AUTOCAST, BASELINE, SweepRow, Verdict

# Less is not worth a change of numerics, and hardly told apart from chance.
FASTER = 1.02


def levels(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that may be recommended in the place of O0."""
    return [row for row in rows if row.name != BASELINE and not is_autocast(row)]


def is_autocast(row: SweepRow) -> bool:
    """Says whether a row is the yardstick, or a variant of it."""
    return row.name.split()[:1] == [AUTOCAST]


def same_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that are as accurate as O0, and were timed under its conditions."""
    return [row for row in levels(rows) if row.verdict is Verdict.SAME and row.speed]


def disturbed_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that are as accurate as O0, and were timed under other conditions."""
    return [row for row in levels(rows) if row.verdict is Verdict.SAME and row.disturbed]


def is_faster(row: SweepRow, other: SweepRow) -> bool:
    """Says whether a row is faster by 2 %, and the quartiles of the two do not overlap."""
    return row.step_ms.high < other.step_ms.low and row.step_ms.median * FASTER <= other.step_ms.median


def is_undecided(row: SweepRow, baseline: SweepRow) -> bool:
    """Says whether the quartiles leave open which of the two is faster, by 2 % at the most favourable.

    A row whose fast quartile is slower than the median of O0 gains nothing, however far its times vary.
    """
    own, other = row.step_ms, baseline.step_ms
    overlap = own.low <= other.median and other.low <= own.high
    return overlap and own.low * FASTER <= other.high
