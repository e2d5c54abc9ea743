"""What is left out of a sweep's times: the warm-up, or of runs that are too short for it their first half."""

from __future__ import annotations

from ampatch.sweeps.records.sweep import Sweep


def said_of_warmup(sweep: Sweep) -> str:
    """Says which steps the times are of, to be read after "median"."""
    warmup = sweep.settings.warmup
    if warmup == 0:
        return "of all steps"
    # The first step has no time, whatever is left out.
    timed = [it.measured for it in sweep.records if it.measured and it.measured.step_ms]
    short = [it.steps - 1 <= warmup for it in timed]
    if short and all(short):
        return "without the first half of so short a run"
    first = "without the first step" if warmup == 1 else f"without the first {warmup} steps"
    return f"{first}, or the first half of a run too short for that" if any(short) else first
