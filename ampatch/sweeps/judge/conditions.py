"""Which runs can be compared in speed: those that lost as much to other programs as the calmest run of O0."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweeps.rows import Run
from ampatch.tools.numbers import ASCII

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


def select_alike(own: Sequence[Run], baseline: Sequence[Run]) -> tuple[list[Run], str]:
    """Returns the runs under the conditions of O0, in its best run; without any all, and what was different.

    All rows, O0 too, are held against that one run: so no run that was disturbed counts for or against any.
    """
    best = calmest(baseline)
    differences = [difference(it, best) if best else "" for it in own]
    alike = [it for it, found in zip(own, differences, strict=True) if not found]
    return (alike, "") if alike or not own else (list(own), differences[0])


def calmest(baseline: Sequence[Run]) -> Run | None:
    """Returns the run of O0 that lost the least."""
    return min(baseline, key=lambda it: it.lost, default=None)


def difference(own: Run, best: Run) -> str:
    """Says in what the conditions of a run were other than those of O0; empty if in nothing that matters."""
    if own.device != best.device:
        return f"it ran on {own.device}, and O0 on {best.device}"
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
