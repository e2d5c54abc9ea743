"""Makes of the records of a sweep its table, a verdict for each level, and the recommendation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampatch.sweeps.columns import COLUMNS, column_of, divide
from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.sweep import BASELINE, Environment, Settings, Sweep, SweepRow, find_row
from ampatch.sweeps.verdicts.conditions import select_alike
from ampatch.sweeps.verdicts.distance import distances
from ampatch.sweeps.verdicts.recommendation import recommend
from ampatch.sweeps.verdicts.verdict import judge


def summarize(settings: Settings, environment: Environment, records: Sequence[RunRecord]) -> Sweep:
    """Returns the sweep that these records make, which may be any part of those that were planned.

    The rows are those of the settings, also where no run of them was made, and in their order.
    """
    records = tuple(records)
    names = dict.fromkeys([*settings.rows, *(record.row for record in records)])
    runs = {name: runs_of(records, name) for name in names}
    baseline = finished(runs.get(BASELINE, []))
    rows = add_ratios([make_row(name, own, baseline, settings.tolerance) for name, own in runs.items()])
    return Sweep(settings, environment, records, rows, recommend(settings, environment, records, rows))


def runs_of(records: Iterable[RunRecord], row: str) -> list[RunRecord]:
    """Returns the runs of a row by seed and repeat, so that the order in which they came changes nothing."""
    return sorted((it for it in records if it.row == row), key=lambda it: (it.seed, it.repeat))


def finished(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Returns the runs that have something to compare."""
    return [record for record in runs if not record.failed and record.measured]


def make_row(
    name: str, own: Sequence[RunRecord], baseline: Sequence[RunRecord], tolerance: float
) -> SweepRow:
    """Sums up the runs of a row; without what compares it with the speed and memory of other rows."""
    done = baseline if name == BASELINE else finished(own)
    alike, disturbed = select_alike(done, baseline)
    measured = [record.measured for record in alike]
    loss, metrics = distances(done, baseline)
    verdict, reason = judge(name, own, baseline, loss, metrics, tolerance)
    return SweepRow(
        name=name,
        runs=len(own),
        failed=sum(record.failed for record in own),
        outcome=outcome_of(own),
        **{it.key: it.of_runs(measured) for it in COLUMNS if it.pool and it.is_in_rows},
        loss=loss,
        metrics=metrics,
        verdict=verdict,
        reason=reason,
        disturbed=disturbed,
        note=note_about(own),
    )


def note_about(runs: Iterable[RunRecord]) -> str:
    """Says so if a run went on from a file that was there before the sweep, and wrote it as well."""
    files = [it.measured.read.resumed for it in runs if it.measured and it.measured.read]
    named = next(filter(None, files), None)
    return f"went on from {named!r}, which was there before the sweep, and wrote it" if named else ""


def outcome_of(runs: Sequence[RunRecord]) -> Ending:
    """Returns how a row ended: well if any run did, else as most of its runs; not run is interrupted."""
    outcomes = Counter(record.outcome for record in runs)
    if Ending.FINISHED in outcomes:
        return Ending.FINISHED
    return max(outcomes, key=lambda it: (outcomes[it], it), default=Ending.INTERRUPTED)


def add_ratios(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Adds how fast the rows are and how much memory they need, compared with O0 and with the fastest."""
    baseline, ms = find_row(rows), column_of("step_ms").of_row
    fastest = min((row for row in rows if row.step_ms and not row.disturbed), key=ms, default=None)
    return tuple(
        replace(
            row,
            speed=None if row.disturbed else divide(ms(baseline), ms(row)),
            speed_to_fastest=None if row.disturbed else divide(ms(fastest), ms(row)),
            memory=divide(row.peak_mib, baseline and baseline.peak_mib),
            memory_to_fastest=divide(row.peak_mib, fastest and fastest.peak_mib),
        )
        for row in rows
    )
