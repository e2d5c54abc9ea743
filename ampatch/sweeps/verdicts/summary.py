"""Makes of the records of a sweep its table, a verdict for each level, and the recommendation."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampatch.sweeps.measure.steps import spread_of
from ampatch.sweeps.records.record import Ending, Record, Spread
from ampatch.sweeps.records.sweep import BASELINE, Environment, Settings, Sweep, SweepRow, find_row
from ampatch.sweeps.verdicts.distance import distances, mean
from ampatch.sweeps.verdicts.recommendation import recommend
from ampatch.sweeps.verdicts.verdict import judge


def summarize(settings: Settings, environment: Environment, records: Sequence[Record]) -> Sweep:
    """Returns the sweep that these records make, which may be any part of those that were planned.

    The rows are those of the settings, also where no run of them was made, and in their order.
    """
    records = tuple(records)
    names = dict.fromkeys([*settings.rows, *(record.row for record in records)])
    runs = {name: runs_of(records, name) for name in names}
    baseline = finished(runs.get(BASELINE, []))
    rows = add_ratios([make_row(name, own, baseline, settings.tolerance) for name, own in runs.items()])
    return Sweep(settings, environment, records, rows, recommend(settings, records, rows))


def runs_of(records: Iterable[Record], row: str) -> list[Record]:
    """Returns the runs of a row by seed and repeat, so that the order in which they came changes nothing."""
    return sorted((it for it in records if it.row == row), key=lambda it: (it.seed, it.repeat))


def finished(runs: Iterable[Record]) -> list[Record]:
    """Returns the runs that have something to compare."""
    return [record for record in runs if not record.failed and record.measured]


def make_row(name: str, own: Sequence[Record], baseline: Sequence[Record], tolerance: float) -> SweepRow:
    """Sums up the runs of a row; without what compares it with the speed and memory of other rows."""
    done = baseline if name == BASELINE else finished(own)
    measured = [record.measured for record in done]
    loss, metrics = distances(done, baseline)
    verdict, reason = judge(name, own, baseline, loss, metrics, tolerance)
    step_ms = pool([it.step_ms for it in measured if it.step_ms])
    rate = divide(1000, step_ms and step_ms.median)
    samples = median(it.samples for it in measured)
    scales = [it.loss_scale for it in measured if it.loss_scale is not None]
    return SweepRow(
        name=name,
        runs=len(own),
        failed=sum(record.failed for record in own),
        outcome=outcome_of(own),
        step_ms=step_ms,
        forward_ms=median(it.forward_ms and it.forward_ms.median for it in measured),
        backward_ms=median(it.backward_ms and it.backward_ms.median for it in measured),
        update_ms=median(it.update_ms and it.update_ms.median for it in measured),
        steps_per_second=rate,
        samples_per_second=None if rate is None or samples is None else rate * samples,
        peak_mib=median(it.peak_mib for it in measured),
        skipped=mean([len(it.skipped) for it in measured]),
        # A scale that was in use, not one between two: they are powers of 2.
        loss_scale=statistics.median_low(scales) if scales else None,
        loss=loss,
        metrics=metrics,
        verdict=verdict,
        reason=reason,
    )


def pool(spreads: Sequence[Spread]) -> Spread | None:
    """Returns the spread of several runs as one: the median of their medians, and quartiles around it.

    Steps of one run are alike, and runs may differ by more than their steps do. So a quartile is that of the
    typical run (the median of the runs' own) or that of the runs' medians, whichever is farther out. `count`
    is of all the steps.

    >>> pool([Spread(10, 7, 12, 100), Spread(10, 8, 14, 100)])
    Spread(median=10.0, low=7.5, high=13.0, count=200)
    """
    if not spreads:
        return None
    medians = spread_of([spread.median for spread in spreads])
    return Spread(
        median=medians.median,
        low=min(medians.low, statistics.median(spread.low for spread in spreads)),
        high=max(medians.high, statistics.median(spread.high for spread in spreads)),
        count=sum(spread.count for spread in spreads),
    )


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are there, None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def outcome_of(runs: Sequence[Record]) -> Ending:
    """Returns how a row ended: well if any run did, else as most of its runs; not run is interrupted."""
    outcomes = Counter(record.outcome for record in runs)
    if Ending.FINISHED in outcomes:
        return Ending.FINISHED
    return max(outcomes, key=lambda it: (outcomes[it], it), default=Ending.INTERRUPTED)


def add_ratios(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Adds how fast the rows are and how much memory they need, compared with O0 and with the fastest."""
    baseline = find_row(rows)
    fastest = min((row for row in rows if row.step_ms), key=lambda row: row.step_ms.median, default=None)
    return tuple(
        replace(
            row,
            speed=divide(step_ms(baseline), step_ms(row)),
            speed_to_fastest=divide(step_ms(fastest), step_ms(row)),
            memory=divide(row.peak_mib, baseline and baseline.peak_mib),
            memory_to_fastest=divide(row.peak_mib, fastest and fastest.peak_mib),
        )
        for row in rows
    )


def step_ms(row: SweepRow | None) -> float | None:
    """Returns the median of a row's steps, if it has one."""
    return row.step_ms.median if row and row.step_ms else None


def divide(value: float | None, unit: float | None) -> float | None:
    """Divides, where there are two numbers that can be divided.

    >>> divide(3.0, 2.0), divide(3.0, None), divide(3.0, 0.0)
    (1.5, None, None)
    """
    return None if value is None or not unit else value / unit
