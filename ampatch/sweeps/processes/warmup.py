"""What is left out of a sweep's times: the warm-up, or of runs that are too short for it their first half."""

from __future__ import annotations

from ampatch.sweeps.records.record import Measured
from ampatch.sweeps.records.sweep import Settings, Sweep


def said_of_warmup(sweep: Sweep) -> str:
    """Says which steps the times are of, to be read after "median"; by the counts that runs measured."""
    warmup = sweep.settings.warmup
    if warmup == 0:
        return "of all steps"
    timed = [it.measured for it in sweep.records if it.measured and it.measured.step_ms]
    left_out = {what_was_left_out(it, sweep.settings) for it in timed} or {"warm-up"}
    first = "without the first step" if warmup == 1 else f"without the first {warmup} steps"
    if "half" not in left_out:
        return first if "warm-up" in left_out else "of all steps"
    if "warm-up" in left_out:
        return f"{first}, or the first half of a run too short for that"
    return "without the first half of so short a run"


def what_was_left_out(measured: Measured, settings: Settings) -> str:
    """Returns "warm-up", "half" or "nothing"; the first step has no time, whatever is left out.

    >>> from ampatch.sweeps.records.record import Spread
    >>> run = Measured(steps=15, step_ms=Spread(1.0, 1.0, 1.0, 9))
    >>> what_was_left_out(run, Settings("a.py", (), (), warmup=5))
    'warm-up'
    >>> what_was_left_out(run, Settings("a.py", (), (), warmup=100))
    'half'
    """
    count = measured.step_ms.count
    left_out = measured.steps - 1 - count
    # Half of the times of so short a run are no more than half of the warm-up.
    if left_out >= settings.warmup or 2 * count > settings.warmup + 1:
        return "warm-up"
    return "half" if left_out > 0 else "nothing"
