"""Judges a level's accuracy, compared with O0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ampatch.sweeps import numbers
from ampatch.sweeps.judge.statistics import compared_metrics, divide, finite, median_of, quantity_of
from ampatch.sweeps.rows import BASELINE, TOLERANCE, Curve, Distance, Ending, Run, Verdict

LAST_STEPS = 20
# A loss that ends above where it began by more than this part of it has not been trained.
RISE = 0.1
# Levels round what they begin with, by 2**-8 at most, and float16 the smallest numbers to 0.
ROUNDED, TINY = 2**-8, 1e-7
OWN_FILES = "give each run files of its own, with {run} in the arguments of the script, or --isolate"
OTHER_LENGTH = 0.9  # of the steps of O0: scripts that stop early stop a little apart
CUT_SHORT = "cut short; levels that --levels names are not"
NAMED = 2  # losses and metrics that a reason names
SLOWER = 1.5  # times the time of O0 a step: less is not slow enough to be told after few steps


def judge(
    name: str,
    own: Sequence[Run],
    baseline: Sequence[Run],
    loss: Distance,
    metrics: Mapping[str, Distance],
) -> tuple[Verdict, str]:
    """Returns the verdict about a level, and the reason in a few words where there is one to give.

    `own` are all the runs of the level in the order of their seeds, `baseline` those of O0 that finished.
    Runs that were interrupted count neither for the level nor against it.
    """
    runs = [run for run in own if run.outcome is not Ending.INTERRUPTED]
    if not runs:
        return Verdict.UNKNOWN, "interrupted" if own else "not run"
    if dependence := why_dependent(runs):
        return Verdict.UNKNOWN, dependence
    if failure := why_failed(runs):
        return Verdict.FAILED, failure
    if name != BASELINE and (start := why_other_start(runs, baseline)):
        return Verdict.UNKNOWN, start
    if cut := next((run for run in runs if run.outcome is Ending.CUT), None):
        return judge_cut(cut, baseline)
    if divergence := why_diverged(runs, baseline, loss):
        return Verdict.DIVERGED, divergence
    if name == BASELINE:
        return Verdict.BASELINE, ""
    if obstacle := why_not_compared(runs, baseline, loss, metrics) or other_length(runs, baseline):
        return Verdict.UNKNOWN, obstacle
    return compare_values([("loss", loss), *metrics.items()])


def judge_cut(run: Run, baseline: Sequence[Run]) -> tuple[Verdict, str]:
    """Judges a level whose run was cut short: it is slow, unless the time went into a few long steps."""
    ratio = divide(run.step_ms, median_of(baseline, "step_ms"))
    return Verdict.SLOW if ratio and ratio >= SLOWER else Verdict.UNKNOWN, CUT_SHORT


def why_dependent(runs: Sequence[Run]) -> str:
    """Says which file a run read that an earlier run of the sweep wrote; empty if none did."""
    reader = next((run for run in runs if run.read), None)
    return f"it read {reader.read!r}, which the run {reader.writer} wrote: {OWN_FILES}" if reader else ""


def why_failed(runs: Sequence[Run]) -> str:
    """Counts how runs ended that did not finish; empty if all of them did."""
    ends = Counter(run.outcome for run in runs if run.failed)
    if not ends or len(runs) == 1:
        return "".join(ends)
    (first, count), *others = sorted(ends.items(), key=lambda end: (-end[1], end[0]))
    rest = [f"{count} {outcome}" for outcome, count in others]
    return ", ".join([f"{count} of {len(runs)} runs {first}", *rest])


def why_other_start(runs: Sequence[Run], baseline: Sequence[Run]) -> str:
    """Says in what a run began otherwise than the first run of O0 with its seed; empty if in nothing."""
    first = {run.seed: run for run in reversed(baseline)}
    for own in runs:
        other = first.get(own.seed)
        if other and own.resumed and own.resumed != other.resumed:
            also = f", and O0 from {other.resumed!r}" if other.resumed else ""
            return f"it went on from {own.resumed!r}{also}, from before the sweep: {OWN_FILES}"
        if other and is_elsewhere(own.start, other.start):
            return f"it began with other weights than O0: {OWN_FILES}, or seed what draws the weights"
    return ""


def is_elsewhere(own: Sequence[float], other: Sequence[float]) -> bool:
    """Says whether one of some weights differs from that of O0 by more than rounding does."""
    pairs = list(zip(own, other, strict=False)) if len(own) == len(other) else []
    return any(not abs(mine - theirs) <= ROUNDED * abs(theirs) + TINY for mine, theirs in pairs)


def other_length(runs: Sequence[Run], baseline: Sequence[Run]) -> str:
    """Says how many steps a run made, if not about as many as O0 with its seed; empty if all did.

    A script that trains for a time ends so, or one that gives up on a bad loss. Some count no skipped steps.
    """
    lengths = {run.seed: run.steps for run in reversed(baseline)}
    for run in runs:
        own, other = run.steps, lengths.get(run.seed)
        if other is None:
            continue
        if own < OTHER_LENGTH * other or OTHER_LENGTH * (own - len(run.skipped)) > other:
            text = f"it ended after {own} steps, and O0 after {other}"
            return f"{text}: --steps {min(own, other)} compares as many of both"
    return ""


def why_diverged(runs: Sequence[Run], baseline: Sequence[Run], loss: Distance) -> str:
    """Says what of a run went out of bounds: a loss or a metric, or the gradients so that no step was made.

    The loss may rise by 10 % or by `TOLERANCE` spreads; what O0's loss does as well is no divergence, and a
    metric that is not finite at O0 tells nothing.
    """
    names = compared_metrics(runs)
    defined = [name for name in names if all(map(math.isfinite, quantity_of(baseline, name).values))]
    first, final = quantity_of(baseline).first, finite(loss.baseline)
    rises = first is None or final is None or final > first
    most = None if rises else TOLERANCE * (loss.spread or 0)
    reasons = [reason for run in runs if (reason := why_run_diverged(run, defined, most))]
    if len(runs) > 1 and reasons:
        return f"{reasons[0]} ({len(reasons)} of {len(runs)} runs)"
    return "".join(reasons)


def why_run_diverged(run: Run, metrics: Sequence[str], most: float | None) -> str:
    """Says in which way one run diverged, empty if in none; `most` is how far its loss may have risen."""
    values = [("loss", run.final_loss, run.losses.values())]
    values += [(name, run.last(name), [run.metrics[name]]) for name in metrics if name in run.metrics]
    for name, value, curves in values:
        if value is not None and not math.isfinite(value):
            return f"{name} is {numbers.number(value)}{since(curves)}"
    last = min(run.steps, LAST_STEPS)
    if last and set(range(run.steps - last + 1, run.steps + 1)) <= set(run.skipped):
        return f"all of the last {last} steps were skipped"
    first, final = run.first_loss, run.final_loss
    if None not in (first, final, most) and final - first > max(RISE * abs(first), most):
        return f"loss rose from {numbers.short(first)} to {numbers.short(final)}"
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


def why_not_compared(
    runs: Sequence[Run], baseline: Sequence[Run], loss: Distance, metrics: Mapping[str, Distance]
) -> str:
    """Says why nothing can be said about accuracy; empty if something can."""
    if any(run.uncast for run in runs):
        return "torch.autocast cast none of its operations"
    if not baseline:
        return "there is no O0 to compare with"
    if loss.baseline is not None and not math.isfinite(loss.baseline):
        return "the loss of O0 is not finite either"
    if all(distance.spreads is None for distance in (loss, *metrics.values())):
        return "nothing to compare: no loss and no metric"
    return ""


def compare_values(distances: Iterable[tuple[str, Distance]]) -> tuple[Verdict, str]:
    """Returns whether a loss or metric is worse than O0's by more than is allowed, and than chance may be."""
    short = [
        (name, distance)
        for name, distance in distances
        if distance.spreads is not None and distance.spreads < -TOLERANCE
    ]
    clear = [(name, distance) for name, distance in short if distance.spreads < -distance.doubt]
    worst = sorted(clear or short, key=lambda pair: (pair[1].spreads, pair[0]))
    named = [f"{name} {write_distance(distance)}" for name, distance in worst[:NAMED]]
    rest = len(worst) - NAMED
    text = "; ".join(named) + (f"; and {rest} more" if rest > 0 else "")
    if clear or not short:
        return (Verdict.WORSE, text) if clear else (Verdict.SAME, "")
    return Verdict.UNSURE, f"{text}, which one seed cannot tell from chance: --seeds 3"


def write_distance(distance: Distance) -> str:
    """Writes a value and how far it is from where it is compared with.

    >>> write_distance(Distance(0.9512, 0.9594, -4.1, 0.002, "seeds"))
    '0.9512, 4.1 spreads below O0'
    >>> write_distance(Distance(0.231, 0.2, -31.0, 0.001, "percent"))
    '0.231, 15.5 % above O0'
    """
    side = "above" if distance.value > distance.baseline else "below"
    if distance.unit == "percent" and distance.baseline:
        far = numbers.percent(abs(distance.value / distance.baseline - 1))
    else:
        far = f"{numbers.signed(abs(distance.spreads)).removeprefix('+')} spreads"
    return f"{numbers.short(distance.value)}, {far} {side} {BASELINE}"


# ---- Conditions: which runs can be compared in speed ----

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
    differences = [difference(run, best) if best else "" for run in own]
    alike = [run for run, other in zip(own, differences, strict=True) if not other]
    return (alike, "") if alike or not own else (list(own), differences[0])


def calmest(baseline: Sequence[Run]) -> Run | None:
    return min(baseline, key=lambda run: run.lost, default=None)


def difference(own: Run, best: Run) -> str:
    """Says in what the conditions of a run were other than those of O0; empty if in nothing that matters."""
    if own.device != best.device:
        return f"it ran on {own.device}, and O0 on {best.device}"
    busy = [(run.busy or 0.0, "busy") for run in (own, best)]
    for lost, least, most in ((own.lost, best.lost, ALIKE), (*busy, BUSY)):
        if abs(lost[0] - least[0]) > most:
            here, at_baseline = (numbers.percent(round(part, 2)) for part, _ in (lost, least))
            if lost < least:
                return f"at O0 {write_lost(*least)}, and here {here}"
            return f"{write_lost(*lost)}, and at O0 {at_baseline}"
    return ""


def write_lost(part: float, how: str) -> str:
    return WORDS[how].format(part=numbers.percent(round(part, 2)))
