"""What is advised: the fastest level that is as accurate as O0, or O0 itself, or how to find out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampatch.sweeps import numbers
from ampatch.sweeps.judge.statistics import (
    compared_metrics,
    distances,
    divide,
    mean,
    median_of,
    most_important,
    pooled_times,
)
from ampatch.sweeps.judge.verdict import BUSY, calmest, judge, select_alike, write_lost
from ampatch.sweeps.rows import (
    AUTOCAST,
    BASELINE,
    Ending,
    Environment,
    Level,
    Outcome,
    Recommendation,
    Run,
    Settings,
    Sweep,
    Verdict,
    find_level,
    finished,
)

# Less is not worth a change of numerics, and hardly told apart from chance.
FASTER = 1.02
LESS_MEMORY = 0.05
SMALL_STEP = 10.0  # ms; in a shorter one there is little arithmetic to speed up
JUDGED = (Verdict.SAME, Verdict.WORSE, Verdict.UNSURE)
WITHOUT = "Without O0 there is nothing to compare with"
FASTEST = "O0 is the fastest here: nothing gains"
ELSEWHERE = "On a GPU, or a CPU with AVX512-BF16 or AMX, the same command may recommend a level."
ALONE = "Run it on a machine that does nothing else"

Advice = tuple[Outcome, str | None, str]


def advise(
    settings: Settings, environment: Environment, runs: Sequence[Run], rows: Sequence[Level]
) -> Recommendation:
    """Advises to take the fastest row that is the same as O0, if it is faster by 2 % at least, or to stay
    at O0.

    What cannot be told is said, with what to do. Rows of `autocast` are there to compare with.
    """
    o0, others = find_level(rows), [row for row in rows if row.name != BASELINE and not row.is_autocast]
    advice = why_not_at_all(o0, others) or choose(o0, others, environment, runs, rows)
    outcome, row, reason = advice
    sentences = [reason]
    if row is not None:
        chosen = find_level(rows, row)
        sentences += [about_equals(chosen, others), about_autocast(chosen, rows)]
    if outcome is Outcome.TAKE:
        sentences.append(about_disturbed(others))
    if any(row.verdict in JUDGED for row in others):
        sentences += [about_seeds(settings, runs) if row else "", about_metrics(runs)]
    sentences.append(about_the_rest(settings, runs))
    return Recommendation(outcome, row, " ".join(filter(None, sentences)))


def stay_at_o0(reason: str) -> Advice:
    return Outcome.STAY, BASELINE, reason


def cannot_tell(reason: str) -> Advice:
    return Outcome.UNKNOWN, None, reason


def why_not_at_all(o0: Level | None, others: Sequence[Level]) -> Advice | None:
    """Says why no level can be compared with O0; None if one can."""
    if o0 is None:
        return cannot_tell(f"{WITHOUT}: add it to --levels.")
    obstacles = {
        f"O0 cannot be compared with: {o0.reason}.": o0.verdict is Verdict.UNKNOWN and o0.runs,
        f"{WITHOUT}, and it was {o0.reason}.": o0.verdict is Verdict.UNKNOWN,
        f"{WITHOUT}, and it failed: {o0.reason}.": o0.outcome is not Ending.FINISHED,
        f"O0 itself diverged ({o0.reason}): training in float32 has to work first.": (
            o0.verdict is Verdict.DIVERGED
        ),
        "There is no level but O0 to choose from.": not others,
        "No times were measured: a step is timed from the one before, and no run of O0 made two.": (
            o0.step_ms is None
        ),
    }
    return next((cannot_tell(reason) for reason, is_in_the_way in obstacles.items() if is_in_the_way), None)


def choose(
    o0: Level, others: Sequence[Level], environment: Environment, runs: Sequence[Run], rows: Sequence[Level]
) -> Advice:
    """Chooses among levels that were compared with an O0 that works."""
    same = [row for row in others if is_timed(row)]
    faster = [row for row in same if row.speed and is_faster(row, o0)]
    best = min(faster or same, key=lambda row: row.step_ms, default=None)
    lost = calmest(finished(runs, BASELINE)).lost
    disturbed = not faster and any(row.disturbed for row in same)
    if best and (disturbed or lost[0] >= BUSY):
        if disturbed:
            return cannot_tell(f"{about_disturbed(others)} {ALONE}, with --repeat 5.")
        return cannot_tell(f"Too noisy to tell: {describe(best, o0)}, and {write_lost(*lost)}. {ALONE}.")
    if not faster and any(is_undecided(row, o0) for row in same):
        return cannot_tell(
            f"Too noisy to tell: {describe(best, o0)}, and their quartiles overlap. {ALONE}, with --repeat 5."
        )
    if faster:
        reason = f"{describe(best, o0, 'as fast')}, and is as accurate: {accuracy(best)}."
        return Outcome.TAKE, best.name, reason
    open_rows = [row for row in others if is_open(row, o0, is_alone=best is None)]
    if open_rows:
        none = all(row.verdict is Verdict.UNKNOWN for row in others) and len(open_rows) == len(others)
        first = "No level can be compared with O0. " if none else ""
        return cannot_tell(f"{first}{why_open(open_rows)}.")
    if o0.verdict is Verdict.FAILED:
        return cannot_tell(f"O0 cannot be relied on ({o0.reason}), and no level of its accuracy is faster.")
    if best is None:
        if all(row.verdict is Verdict.SLOW for row in others):
            return stay_at_o0(why_slow(environment, rows))
        verdicts = ", ".join(f"{row.name} {unknown_or(row)}" for row in others)
        unsure = any(row.verdict is Verdict.UNSURE for row in others)
        slower = ", and those of which one seed cannot tell are slower" if unsure else ""
        near = " and comes near its speed" if any(row.verdict is Verdict.SLOW for row in others) else ""
        return stay_at_o0(f"No other level has the accuracy of O0{near}{slower}: {verdicts}.")
    return stay_at_o0(say_slow(o0, best, environment, rows))


def say_slow(o0: Level, best: Level, environment: Environment, rows: Sequence[Level]) -> str:
    """Says that no level is faster, and how fast the fastest is."""
    fastest = max((row.speed for row in rows if row.speed and row is not o0), default=1)
    first = "" if fastest * FASTER > 1 else f"{why_slow(environment, rows)} "
    but = (
        " but for autocast"
        if any(row.is_autocast and (row.speed or 0) > (best.speed or 0) for row in rows)
        else ""
    )
    speed = numbers.ratio(divide(o0.step_ms, best.step_ms))
    return (
        f"{first}No level with the accuracy of O0 is faster by {numbers.percent(FASTER - 1)} or more: the "
        f"fastest{but}, {best.name}, runs at {speed} the speed of O0."
    )


# ---- Which rows there are to choose from ----


def is_timed(row: Level) -> bool:
    """Says whether a row is as accurate as O0, and was timed, under its conditions or others."""
    return row.verdict is Verdict.SAME and row.step_ms is not None and bool(row.speed or row.disturbed)


def is_faster(row: Level, other: Level) -> bool:
    return row.step_ms_high < other.step_ms_low and row.step_ms * FASTER <= other.step_ms


def is_undecided(row: Level, o0: Level) -> bool:
    """Says whether the quartiles leave open which of the two is faster, by 2 % at the most favourable.

    A row whose fast quartile is slower than the median of O0 gains nothing, however far its times vary.
    """
    overlap = row.step_ms_low <= o0.step_ms and o0.step_ms_low <= row.step_ms_high
    return overlap and row.step_ms_low * FASTER <= o0.step_ms_high


def is_open(row: Level, o0: Level, *, is_alone: bool) -> bool:
    """Says whether a row was not compared, or not surely, and may be faster than O0.

    Where no other row is as accurate, one that was not compared is open however fast it is.
    """
    may_be_faster = row.step_ms is None or row.step_ms_low * FASTER <= o0.step_ms_high
    was_run = row.outcome is not Ending.INTERRUPTED
    if row.verdict is Verdict.UNKNOWN:
        return was_run and (is_alone or may_be_faster)
    return row.verdict is Verdict.UNSURE and may_be_faster


# ---- Sentences ----


def describe(row: Level, o0: Level, kind: str = "") -> str:
    """Says how fast a row is, beside O0, by its quartiles, or by medians with the memory that it saves."""
    if kind:
        times = " against ".join(numbers.number(level.step_ms) for level in (row, o0))
        saves = row.memory is not None and row.memory <= 1 - LESS_MEMORY
        also = f", with {100 * (1 - row.memory):.0f} % less memory" if saves else ""
    else:
        spans = [
            f"{numbers.number(level.step_ms_low)} to {numbers.number(level.step_ms_high)}"
            for level in (row, o0)
        ]
        times, also = " against ".join(spans), ""
    speed = numbers.ratio(divide(o0.step_ms, row.step_ms))
    return f"{row.name} runs at {speed} the speed of O0 ({times} ms a step){also}"


def accuracy(row: Level) -> str:
    """Writes the metric that matters most, or the loss where none is reported, beside that of O0."""
    compared = [name for name, distance in row.metrics.items() if distance.spreads is not None]
    name = most_important(compared) or "loss"
    distance = row.metrics[name] if compared else row.loss
    far = "" if distance.unit == "percent" else f" ({numbers.signed(distance.spreads)} spreads)"
    return f"{name} {numbers.short(distance.value)} against {numbers.short(distance.baseline)}{far}"


def unknown_or(row: Level) -> str:
    return f"unknown ({row.reason})" if row.verdict is Verdict.UNKNOWN else row.verdict.value


def why_open(rows: Sequence[Level]) -> str:
    """Says of which levels it is open whether they are as good as O0, and why."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        fast = f"{row.name} runs at {numbers.ratio(row.speed)} the speed of O0" if row.speed else row.name
        reasons.setdefault(row.reason, []).append(fast)
    return ". ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def why_slow(environment: Environment, rows: Sequence[Level]) -> str:
    """Says that O0 is the fastest, and why, as far as the device and the times show it."""
    names = [row.name for row in rows if row.step_ms and row.name != BASELINE and not row.is_autocast]
    slow, on_cpu = [name for name in names if not is_bfloat16(name)], environment.device == "cpu"
    step = next((row.step_ms for row in rows if row.name == BASELINE and row.step_ms), SMALL_STEP)
    small = f"a step of {numbers.number(step)} ms has only small products"
    reasons = {
        f"float16 is slow on a CPU: {', '.join(slow)}": on_cpu and slow,
        "O6 only emulates float8 on a CPU": on_cpu and any(name.startswith("O6") for name in names),
        "this CPU has no instructions for bfloat16": not environment.has_bfloat16,
        f"{small}, and casts cost more than those gain": step < SMALL_STEP,
    }
    causes = [reason for reason, holds in reasons.items() if holds]
    because = f" ({'; '.join(causes)})" if causes else ""
    where = "" if environment.has_bfloat16 else f" {ELSEWHERE}"
    return f"{FASTEST}{because}.{where}"


def is_bfloat16(name: str) -> bool:
    return "dtype=bfloat16" in name or (name[:2] in ("O4", "O5", "O6") and "dtype=float16" not in name)


# ---- What is said beside it: what it leaves open, and what would tell more ----


def about_equals(chosen: Level, others: Sequence[Level]) -> str:
    """Names the rows that may be as fast as the chosen one: where their quartiles overlap."""
    same = [row for row in others if is_timed(row) and row is not chosen and not row.disturbed]
    names = ", ".join(row.name for row in same if row.step_ms_low <= (chosen.step_ms_high or 0))
    return f"Times do not tell it apart from {names}." if names and chosen.name != BASELINE else ""


def about_autocast(chosen: Level, rows: Sequence[Level]) -> str:
    """Says so if torch.autocast is faster than what is recommended."""
    timed = [row for row in rows if row.is_autocast and row.speed]
    best = min(timed, key=lambda row: row.step_ms, default=None)
    speed = chosen.step_ms / best.step_ms if best and chosen.step_ms else 0
    if speed < FASTER:
        return ""
    but = "" if best.verdict is Verdict.SAME else f", but is {best.verdict} ({best.reason})"
    name = "torch.autocast" if best.name == AUTOCAST else f"torch.autocast ({best.name})"
    return f"{name} runs at {numbers.ratio(speed)} the speed of {chosen.name}{but}."


def about_disturbed(others: Sequence[Level]) -> str:
    """Names the rows as accurate as O0 whose speed is not known, since they ran under other conditions."""
    rows = [row for row in others if is_timed(row) and row.disturbed]
    names = ", ".join(row.name for row in rows)
    text = f"The speed of {names} is not known, as it ran under other conditions than O0: "
    return f"{text}{rows[0].disturbed}." if rows else ""


def about_seeds(settings: Settings, runs: Sequence[Run]) -> str:
    """Warns where nothing is known about chance: with one seed, or with seeds that changed nothing."""
    own = finished(runs, BASELINE)
    if len({run.seed for run in own}) < 2:
        more = "--seeds 3" if settings.seeds < 2 else "let all seeds finish"
        return f"With one seed, differences of accuracy by chance cannot be told apart: {more}."
    names = compared_metrics(own)
    results = {(run.final_loss, run.first_loss, *map(run.last, names)) for run in own}
    return "The seeds changed nothing: does the script set its own?" if len(results) == 1 else ""


def about_metrics(runs: Sequence[Run]) -> str:
    """Says so if no metric was compared, and which line of the script would change that."""
    if compared_metrics(finished(runs)):
        return ""
    line = "amp.report(accuracy=...) in the script (import ampatch as amp)"
    return f"Only the training loss was compared. The line {line} changes that."


def about_the_rest(settings: Settings, runs: Sequence[Run]) -> str:
    """Says so if not all of the runs were made, and how to make the others."""
    over = {run.row for run in runs if run.outcome is Ending.CUT}
    made = sum(run.outcome is not Ending.INTERRUPTED for run in runs if run.row not in over)
    planned = settings.runs - len(over) * settings.seeds * settings.repeat
    return f"Only {made} of {planned} runs were made." if made < planned else ""


# ---- The sweep that runs make ----


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
        measured = distances(done, baseline, moved)
        verdict = judge(name, own, baseline, *measured)
        timed = select_alike([run for run in own if not run.failed], baseline)
        levels.append(make_level(name, own, timed, measured, verdict))
    rows = add_ratios(levels)
    return Sweep(settings, environment, tuple(runs), rows, advise(settings, environment, ordered, rows))


def make_level(name: str, own: Sequence[Run], alike: tuple, distances: tuple, verdict: tuple) -> Level:
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
        loss=distances[0],
        metrics=distances[1],
        **pooled_times(runs),
        speed=None,
        peak_mib=median_of(runs, "peak_mib"),
        memory=None,
        skipped=mean([len(run.skipped) for run in runs]),
        # One that was in use, and not one between two: they are powers of 2.
        loss_scale=statistics.median_low(scales) if scales else None,
        disturbed=disturbed,
    )


def outcome_of(runs: Iterable[Run]) -> Ending:
    """Returns how a level ended: well if any run did, else as most of its runs; not run is interrupted."""
    outcomes = Counter(run.outcome for run in runs)
    if Ending.FINISHED in outcomes:
        return Ending.FINISHED
    return max(outcomes, key=lambda ending: (outcomes[ending], ending), default=Ending.INTERRUPTED)


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
