"""Which runs can be compared in speed, and which rows are told apart by their times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampatch.sweeps.records.record import RunRecord
from ampatch.sweeps.records.sweep import AUTOCAST, BASELINE, SweepRow, Verdict
from ampatch.tools.numbers import ASCII

# Less is not worth a change of numerics, and hardly told apart from chance.
FASTER = 1.02
# Times of runs that lost parts of their time which differ by more than this are of other conditions.
ALIKE = 0.05
# From this part on times say nothing, however often repeated: with two busy loops on two cores a level of 1.5
# times the speed of O0 came out at 0.62 of it, twice in a row.
BUSY = 0.25
WORDS = {
    "busy": "other programs took {part} of the processors' time",
    "waited": "other programs had the processor {part} of the time that a run wanted it",
    "throttled": "the limit of the container stopped a run {part} of the time",
}


def select_alike(own: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> tuple[list[RunRecord], str]:
    """Returns the runs under the conditions of O0, in its best run; without any all, and what was different.

    All rows, O0 too, are held against that one run: so no run that was disturbed counts for or against any.
    """
    best = calmest(baseline)
    differences = [difference(it, best) if best else "" for it in own]
    alike = [it for it, found in zip(own, differences, strict=True) if not found]
    return (alike, "") if alike or not own else (list(own), differences[0])


def calmest(records: Iterable[RunRecord]) -> RunRecord | None:
    """Returns the run of O0 that lost the least."""
    runs = [it for it in records if it.row == BASELINE and not it.failed and it.measured]
    return min(runs, key=lambda it: it.lost, default=None)


def difference(own: RunRecord, best: RunRecord) -> str:
    """Says in what the conditions of a run were other than those of O0; empty if in nothing that matters."""
    devices = [it.measured.device for it in (own, best) if it.measured]
    if len(set(devices)) > 1:
        return f"it ran on {devices[0]}, and O0 on {devices[1]}"
    busy = [(it.busy or 0.0, "busy") for it in (own, best)]
    for lost, least, most in ((own.lost, best.lost, ALIKE), (*busy, BUSY)):
        if abs(lost[0] - least[0]) > most:
            here, there = (ASCII.percent(round(part, 2)) for part, _ in (lost, least))
            if lost < least:
                return f"at O0 {write_lost(*least)}, and here {here}"
            return f"{write_lost(*lost)}, and at O0 {there}"
    return ""


def write_lost(part: float, how: str) -> str:
    """Says which part of its time a run lost to others, and how."""
    return WORDS[how].format(part=ASCII.percent(round(part, 2)))


# ---- Rows ----


def levels(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that may be recommended in the place of O0."""
    return [row for row in rows if row.name != BASELINE and not is_autocast(row)]


def is_autocast(row: SweepRow) -> bool:
    """Says whether a row is the yardstick, or a variant of it."""
    return row.name.split()[:1] == [AUTOCAST]


def same_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that are as accurate as O0, and were timed, under its conditions or others."""
    timed = [row for row in levels(rows) if row.verdict is Verdict.SAME and row.step_ms]
    return [row for row in timed if row.speed or row.disturbed]


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
