"""Judges a level's accuracy, compared with O0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ampatch.sweeps.records.record import Curve, Ending, Measured, RunRecord
from ampatch.sweeps.records.sweep import BASELINE, Distance, Verdict
from ampatch.sweeps.verdicts.distance import compared_metrics, finite, loss_sample, metric_sample
from ampatch.tools.numbers import ASCII

LAST_STEPS = 20
# A loss that ends above where it began by more than this part of it has not been trained.
RISE = 0.1
# Levels round what they begin with, by 2**-8 at most. Training changes weights by more than this part.
OTHER_WEIGHTS = 0.01
OTHER_START = (
    "it began with other weights than O0: give each run checkpoints of its own, with {level} and {seed} in "
    "the arguments of the script, or seed what draws the weights"
)
OTHER_LENGTH = 0.9  # of the steps of O0: scripts that stop early stop a little apart
NAMED = 2  # losses and metrics that a reason names


def judge(
    name: str,
    own: Sequence[RunRecord],
    baseline: Sequence[RunRecord],
    loss: Distance,
    metrics: Mapping[str, Distance],
    tolerance: float,
) -> tuple[Verdict, str]:
    """Returns the verdict about a row, and the reason in a few words where there is one to give.

    `own` are all the runs of the row in the order of their seeds, `baseline` those of O0 that finished. Runs
    that were interrupted count neither for the row nor against it.
    """
    runs = [record for record in own if record.outcome is not Ending.INTERRUPTED]
    if not runs:
        return Verdict.UNKNOWN, "interrupted" if own else "not run"
    if dependence := why_dependent(runs):
        return Verdict.UNKNOWN, dependence
    if failure := why_failed(runs):
        return Verdict.FAILED, failure
    if name != BASELINE and began_elsewhere(runs, baseline):
        return Verdict.UNKNOWN, OTHER_START
    if divergence := why_diverged(runs, baseline, loss, tolerance):
        return Verdict.DIVERGED, divergence
    if name == BASELINE:
        return Verdict.BASELINE, ""
    if any(it.measured.uncast for it in runs if it.measured):
        return Verdict.UNKNOWN, "torch.autocast cast none of its operations"
    if obstacle := why_not_compared(baseline, loss, metrics) or other_length(runs, baseline):
        return Verdict.UNKNOWN, obstacle
    inferiority = why_worse([("loss", loss), *metrics.items()], tolerance)
    return (Verdict.WORSE, inferiority) if inferiority else (Verdict.SAME, "")


def why_dependent(runs: Sequence[RunRecord]) -> str:
    """Says which file a run read that an earlier run of the sweep wrote; empty if none did."""
    for it in runs:
        read = it.measured.read if it.measured else None
        if read and read.file:
            return (
                f"it read {read.file!r}, which the run {read.writer} wrote: give each run files of its own, "
                "with {run} in the arguments of the script, or --isolate"
            )
    return ""


def why_failed(runs: Sequence[RunRecord]) -> str:
    """Counts how runs ended that did not finish; empty if all of them did."""
    ends = Counter(record.outcome for record in runs if record.failed)
    if not ends or len(runs) == 1:
        return "".join(ends)
    (first, count), *others = sorted(ends.items(), key=lambda end: (-end[1], end[0]))
    rest = [f"{count} {outcome}" for outcome, count in others]
    return ", ".join([f"{count} of {len(runs)} runs {first}", *rest])


def began_elsewhere(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> bool:
    """Whether a run began with other weights than the first run of O0 with its seed."""
    starts = {it.seed: it.measured.start for it in reversed(baseline) if it.measured}
    pairs = [(it.measured.start, starts.get(it.seed, ())) for it in runs if it.measured]
    return any(is_elsewhere(own, other) for own, other in pairs if len(own) == len(other))


def is_elsewhere(own: Sequence[float], other: Sequence[float]) -> bool:
    """Whether weights differ from others by more than rounding does."""
    return not math.dist(own, other) <= OTHER_WEIGHTS * math.hypot(*other)


def other_length(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> str:
    """Says how many steps a run made, if not about as many as O0 with its seed; empty if all did.

    A script that trains for a time ends so, or one that gives up on a bad loss. Some count no skipped steps.
    """
    lengths = {it.seed: it.measured.steps for it in reversed(baseline) if it.measured}
    for it in runs:
        if it.measured is None or it.seed not in lengths:
            continue
        own, other = it.measured.steps, lengths[it.seed]
        if own < OTHER_LENGTH * other or OTHER_LENGTH * (own - len(it.measured.skipped)) > other:
            said = f"it ended after {own} steps, and O0 after {other}"
            return f"{said}: --steps {min(own, other)} compares as many of both"
    return ""


def why_diverged(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], loss: Distance, tolerance: float
) -> str:
    """Says what of a run went out of bounds: a loss or a metric, or the gradients so that no step was made.

    The loss may rise by 10 % or by `tolerance` spreads; what O0's loss does as well is no divergence, and a
    metric that is not finite at O0 tells nothing.
    """
    defined = [
        it for it in compared_metrics(runs) if all(map(math.isfinite, metric_sample(baseline, it).values))
    ]
    first, final = loss_sample(baseline).first, finite(loss.baseline)
    rises = first is None or final is None or final > first
    most = None if rises else tolerance * (loss.spread or 0)
    reasons = [why_run_diverged(it.measured, defined, most) for it in runs if it.measured]
    found = [reason for reason in reasons if reason]
    if len(runs) > 1 and found:
        return f"{found[0]} ({len(found)} of {len(runs)} runs)"
    return "".join(found)


def why_run_diverged(measured: Measured, metrics: Sequence[str], most: float | None) -> str:
    """Says in which way one run diverged, empty if in none; `most` is how far its loss may have risen."""
    first, final = measured.first_loss, measured.final_loss
    curves = {name: [measured.metrics[name]] for name in metrics if name in measured.metrics}
    values = [("loss", final, measured.losses.values())]
    values += [(name, measured.final(name), own) for name, own in curves.items()]
    for name, value, own in values:
        if value is not None and not math.isfinite(value):
            return f"{name} is {ASCII.number(value)}{since(own)}"
    last = min(measured.steps, LAST_STEPS)
    if last and set(range(measured.steps - last + 1, measured.steps + 1)) <= set(measured.skipped):
        return f"all of the last {last} steps were skipped"
    if None not in (first, final, most) and final - first > max(RISE * abs(first), most):
        return f"loss rose from {ASCII.short(first)} to {ASCII.short(final)}"
    return ""


def since(curves: Iterable[Curve]) -> str:
    """Says since which step the values are no longer finite, as far as the curves know.

    >>> since([Curve((1, 2, 3, 4), (math.inf, 0.5, math.nan, math.nan))])
    ' from step 3 on'
    """
    starts = []
    for curve in curves:
        good = [at for at, value in enumerate(curve.values, 1) if math.isfinite(value)]
        starts += curve.steps[good[-1] if good else 0 :][:1]
    return f" from step {min(starts)} on" if starts else ""


def why_not_compared(baseline: Sequence[RunRecord], loss: Distance, metrics: Mapping[str, Distance]) -> str:
    """Says why nothing can be said about accuracy; empty if something can."""
    if not baseline:
        return "there is no O0 to compare with"
    if loss.baseline is not None and not math.isfinite(loss.baseline):
        return "the loss of O0 is not finite either"
    if all(distance.spreads is None for distance in (loss, *metrics.values())):
        return "nothing to compare: no loss and no metric"
    return ""


def why_worse(distances: Iterable[tuple[str, Distance]], tolerance: float) -> str:
    """Names the losses and metrics that are worse than O0's by more than the tolerance, the worst first."""
    short = [(name, it) for name, it in distances if it.spreads is not None and it.spreads < -tolerance]
    worst = sorted(short, key=lambda pair: (pair[1].spreads, pair[0]))
    named = [f"{name} {write_distance(it)}" for name, it in worst[:NAMED]]
    rest = len(worst) - NAMED
    return "; ".join(named) + (f"; and {rest} more" if rest > 0 else "")


def write_distance(distance: Distance, origin: str = BASELINE) -> str:
    """Writes a value and how far it is from where it is compared with.

    >>> write_distance(Distance(0.9512, 0.9594, -4.1, 0.002, "seeds"))
    '0.9512, 4.1 spreads below O0'
    >>> write_distance(Distance(0.231, 0.2, -31.0, 0.001, "percent"))
    '0.231, 15.5 % above O0'
    """
    side = "above" if distance.value > distance.baseline else "below"
    if distance.unit == "percent" and distance.baseline:
        far = ASCII.percent(abs(distance.value / distance.baseline - 1))
    else:
        far = f"{ASCII.signed(abs(distance.spreads)).removeprefix('+')} spreads"
    return f"{ASCII.short(distance.value)}, {far} {side} {origin}"
