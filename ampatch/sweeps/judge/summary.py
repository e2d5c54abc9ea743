"""Makes of the runs of a sweep its levels, and what is advised."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampatch.sweeps.judge.advice import advise
from ampatch.sweeps.judge.conditions import select_alike
from ampatch.sweeps.judge.statistics import distances, divide, mean, median_of, pooled_times
from ampatch.sweeps.judge.verdict import judge
from ampatch.sweeps.rows import (
    AUTOCAST,
    BASELINE,
    Ending,
    Environment,
    Level,
    Run,
    Settings,
    Sweep,
    find_level,
    finished,
)


def summarize(settings: Settings, environment: Environment, runs: Sequence[Run]) -> Sweep:
    """Returns the sweep that these runs make, which may be any part of those that were planned.

    The levels are those of the settings, also where no run of them was made, and in their order.
    """
    names = dict.fromkeys([*settings.rows, *(run.row for run in runs)])
    # By seed and repeat, so that the order in which they came changes nothing.
    ordered = sorted(runs, key=lambda run: (run.seed, run.repeat))
    baseline = finished(ordered, BASELINE)
    yardstick = [run for run in finished(ordered, AUTOCAST) if not (run.uncast or run.read)]
    levels = []
    for name in names:
        own = [run for run in ordered if run.row == name]
        done = baseline if name == BASELINE else finished(own)
        # The yardstick is not measured by itself.
        moved = () if name.split()[:1] == [AUTOCAST] else yardstick
        found = distances(done, baseline, moved, settings.tolerance)
        verdict = judge(name, own, baseline, *found, settings.tolerance)
        timed = select_alike([run for run in own if not run.failed], baseline)
        levels.append(make_level(name, own, timed, found, verdict))
    rows = add_ratios(levels)
    return Sweep(settings, environment, tuple(runs), rows, advise(settings, environment, ordered, rows))


def make_level(name: str, own: Sequence[Run], alike: tuple, found: tuple, verdict: tuple) -> Level:
    """Sums up the runs of a level; without what compares it with the speed and memory of O0."""
    runs, disturbed = alike
    scales = [run.loss_scale for run in runs if run.loss_scale is not None]
    resumed = next((run.resumed for run in own if run.resumed), "")
    return Level(
        name=name,
        runs=len(own),
        failed=sum(run.failed for run in own),
        outcome=outcome_of(own),
        verdict=verdict[0],
        reason=verdict[1],
        note=f"went on from {resumed!r}, which was there before the sweep, and wrote it" if resumed else "",
        loss=found[0],
        metrics=found[1],
        **pooled_times(runs),
        speed=None,
        peak_mib=median_of(runs, "peak_mib"),
        memory=None,
        skipped=mean([len(run.skipped) for run in runs]),
        # One that was in use, and not one between two: they are powers of 2.
        loss_scale=statistics.median_low(scales) if scales else None,
        kept_mib=median_of(runs, "kept_mib"),
        processor_ms=median_of(runs, "processor_ms"),
        disturbed=disturbed,
    )


def outcome_of(runs: Iterable[Run]) -> Ending:
    """Returns how a level ended: well if any run did, else as most of its runs; not run is interrupted."""
    outcomes = Counter(run.outcome for run in runs)
    if Ending.FINISHED in outcomes:
        return Ending.FINISHED
    return max(outcomes, key=lambda it: (outcomes[it], it), default=Ending.INTERRUPTED)


def add_ratios(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Adds how fast the levels are and how much memory they need, compared with O0."""
    o0 = find_level(levels)
    ms, mib = (o0.step_ms, o0.peak_mib) if o0 else (None, None)
    return tuple(
        replace(
            level,
            speed=None if level.disturbed else divide(ms, level.step_ms),
            memory=divide(level.peak_mib, mib),
        )
        for level in levels
    )
