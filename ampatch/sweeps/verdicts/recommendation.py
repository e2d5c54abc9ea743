"""Names the level to take: the fastest that is as accurate as O0, where times can be told apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ampatch.sweeps.records.record import Ending, Record
from ampatch.sweeps.records.sweep import (
    AUTOCAST,
    BASELINE,
    Recommendation,
    Settings,
    SweepRow,
    Verdict,
    find_row,
)
from ampatch.sweeps.verdicts.distance import compared_metrics
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.tools.numbers import ASCII

TOO_NOISY = "Too noisy to tell"
# Less is not worth a change of numerics, and hardly told apart from chance.
FASTER = 1.02
LESS_MEMORY = 0.05
# From this part of the processors' time in other programs on, times say nothing, however often repeated: with
# two busy loops on two cores a level of 1.5 times the speed of O0 came out at 0.62 of it, twice in a row.
BUSY = 0.25


def recommend(settings: Settings, records: Sequence[Record], rows: Sequence[SweepRow]) -> Recommendation:
    """Recommends the fastest row that is the same as O0, if it is faster by 2 % at least, or else O0.

    Nothing is recommended where times are too noisy to tell. Rows of `autocast` are there to compare with.
    """
    more = "--repeat 5" if settings.budget is None else "a larger --budget"
    name, reason = choose(rows, why_noisy(records), more)
    chosen = find_row(rows, name)
    sentences = [reason]
    if chosen:
        sentences += [
            about_equals(chosen, rows),
            about_autocast(chosen, rows),
            about_seeds(settings, records),
        ]
    sentences += [about_budget(settings, records, reason), about_the_rest(settings, records)]
    return Recommendation(name, " ".join(filter(None, sentences)))


def is_too_noisy(it: Recommendation) -> bool:
    """Says whether nothing is recommended because times cannot be told apart."""
    return it.reason.startswith(TOO_NOISY)


def choose(rows: Sequence[SweepRow], noise: str = "", more: str = "--repeat 5") -> tuple[str | None, str]:
    """Returns the name of the row to take, None if there is none, and why."""
    baseline = find_row(rows)
    obstacle = why_none(baseline, rows)
    if obstacle:
        return None, obstacle
    same = same_rows(rows)
    faster = [row for row in same if is_faster(row, baseline)]
    best = max(faster or same, key=lambda row: row.speed, default=None)
    if best and (noise or (not faster and any(is_undecided(row, baseline) for row in same))):
        return None, too_noisy(best, baseline, noise, more)
    if faster:
        return best.name, praise(best, baseline)
    if baseline.verdict is Verdict.FAILED:
        return None, f"O0 cannot be relied on ({baseline.reason}), and no level of its accuracy is faster."
    if best:
        yardsticks = [row.speed for row in rows if is_autocast(row) and row.speed]
        but = " but for autocast" if max(yardsticks, default=0) > best.speed else ""
        return BASELINE, (
            f"No level with the accuracy of O0 is faster by {ASCII.percent(FASTER - 1)} or more: "
            f"the fastest{but}, {best.name}, runs at {ASCII.ratio(best.speed)} the speed of O0."
        )
    said = (f"{row.name} {unknown_or(row)}" for row in levels(rows))
    return BASELINE, f"No other level has the accuracy of O0: {', '.join(said)}."


def same_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that are as accurate as O0, and were timed."""
    return [row for row in levels(rows) if row.verdict is Verdict.SAME and row.speed]


def is_faster(row: SweepRow, other: SweepRow) -> bool:
    """Says whether a row is faster by 2 %, and the quartiles of the two do not overlap."""
    return row.step_ms.high < other.step_ms.low and row.step_ms.median * FASTER <= other.step_ms.median


def is_undecided(row: SweepRow, baseline: SweepRow) -> bool:
    """Says whether the quartiles leave open which of the two is faster, by 2 % at the most favourable."""
    own, other = row.step_ms, baseline.step_ms
    overlap = own.low <= other.high and other.low <= own.high
    return overlap and own.low * FASTER <= other.high


def why_noisy(records: Sequence[Record]) -> str:
    """Says how much of the machine other programs took in a typical run, if much; else empty."""
    shares = [record.busy for record in records if record.busy is not None]
    busy = statistics.median(shares) if shares else 0.0
    return (
        f"other programs took {ASCII.percent(round(busy, 2))} of the processors' time" if busy >= BUSY else ""
    )


def too_noisy(row: SweepRow, baseline: SweepRow, noise: str, more: str) -> str:
    """Says why times do not tell which row to take, and what would."""
    why, how = (noise, "") if noise else ("their quartiles overlap", f", with {more}")
    return (
        f"{TOO_NOISY}: {row.name} runs at {ASCII.ratio(row.speed)} the speed of O0 "
        f"({quartiles(row)} against {quartiles(baseline)} ms a step), and {why}. Run it on a machine that "
        f"does nothing else{how}."
    )


def quartiles(row: SweepRow) -> str:
    """Writes between which times the middle half of the steps lies."""
    return f"{ASCII.number(row.step_ms.low)} to {ASCII.number(row.step_ms.high)}"


def unknown_or(row: SweepRow) -> str:
    """Writes the verdict about a row in a sentence."""
    return f"unknown ({row.reason})" if row.verdict is Verdict.UNKNOWN else row.verdict.value


def levels(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Returns the rows that may be recommended in the place of O0."""
    return [row for row in rows if row.name != BASELINE and not is_autocast(row)]


def is_autocast(row: SweepRow) -> bool:
    """Says whether a row is the yardstick, or a variant of it."""
    return row.name.split()[:1] == [AUTOCAST]


def why_none(baseline: SweepRow | None, rows: Sequence[SweepRow]) -> str:
    """Says why no row can be recommended, empty if one can."""
    without = "Without O0 there is nothing to compare with"
    if baseline is None:
        return f"{without}: add it to --levels."
    if baseline.verdict is Verdict.UNKNOWN:
        return f"{without}, and it was {baseline.reason}."
    if baseline.outcome is not Ending.FINISHED:
        return f"{without}, and it failed: {baseline.reason}."
    if baseline.verdict is Verdict.DIVERGED:
        return f"O0 itself diverged ({baseline.reason}): training in float32 has to work first."
    if not levels(rows):
        return "There is no level but O0 to choose from."
    if baseline.step_ms is None:
        return "No times were measured: a step is timed from the one before, and no run of O0 made two."
    if all(row.verdict is Verdict.UNKNOWN for row in levels(rows)):
        reasons = dict.fromkeys(row.reason for row in levels(rows))
        return f"No level can be compared with O0: {', '.join(reasons)}."
    return ""


def praise(row: SweepRow, baseline: SweepRow) -> str:
    """Says in a sentence what speaks for a row that is as accurate as O0."""
    times = f"{ASCII.number(row.step_ms.median)} against {ASCII.number(baseline.step_ms.median)} ms a step"
    saves = row.memory is not None and row.memory <= 1 - LESS_MEMORY
    memory = f", with {100 * (1 - row.memory):.0f} % less memory" if saves else ""
    return (
        f"{row.name} runs at {ASCII.ratio(row.speed)} the speed of O0 ({times}){memory}, "
        f"and is as accurate: {accuracy(row)}."
    )


def accuracy(row: SweepRow) -> str:
    """Writes the metric that matters most, or the loss where none is reported, beside that of O0."""
    compared = [name for name, it in row.metrics.items() if it.spreads is not None]
    name = most_important(compared) or "loss"
    it = row.metrics[name] if compared else row.loss
    far = "" if it.unit == "percent" else f" ({ASCII.signed(it.spreads)} spreads)"
    return f"{name} {ASCII.short(it.value)} against {ASCII.short(it.baseline)}{far}"


def about_equals(chosen: SweepRow, rows: Sequence[SweepRow]) -> str:
    """Names the rows that may be as fast as the chosen one: where their quartiles overlap."""
    others = [row for row in same_rows(rows) if row is not chosen and row.step_ms.low <= chosen.step_ms.high]
    if chosen.name == BASELINE or not others:
        return ""
    names = ", ".join(row.name for row in others)
    return f"Times do not tell it apart from {names}."


def about_autocast(chosen: SweepRow, rows: Sequence[SweepRow]) -> str:
    """Says so if torch.autocast is faster than what is recommended."""
    timed = [row for row in rows if is_autocast(row) and row.step_ms and row.step_ms.median]
    best = min(timed, key=lambda row: row.step_ms.median, default=None)
    speed = chosen.step_ms.median / best.step_ms.median if best and chosen.step_ms else 0
    if speed < FASTER:
        return ""
    but = "" if best.verdict is Verdict.SAME else f", but is {best.verdict} ({best.reason})"
    name = "torch.autocast" if best.name == AUTOCAST else f"torch.autocast ({best.name})"
    return f"{name} runs at {ASCII.ratio(speed)} the speed of {chosen.name}{but}."


def about_seeds(settings: Settings, records: Sequence[Record]) -> str:
    """Warns where nothing is known about chance: with one seed, or with seeds that changed nothing."""
    runs = [it for it in records if it.row == BASELINE and not it.failed and it.measured]
    if len({record.seed for record in runs}) < 2:
        more = "--seeds 3" if settings.seeds < 2 else "let all seeds finish"
        return f"With one seed, differences of accuracy by chance cannot be told apart: {more}."
    names = compared_metrics(runs)
    measured = [it.measured for it in runs]
    results = {(it.final_loss, it.first_loss, *map(it.final, names)) for it in measured}
    return "The seeds changed nothing: does the script set its own?" if len(results) == 1 else ""


def about_budget(settings: Settings, records: Sequence[Record], reason: str) -> str:
    """Says how often it was run, where that was left to a budget, and what ended it."""
    if settings.budget is None or any(record.outcome is Ending.INTERRUPTED for record in records):
        return ""
    often = ASCII.plural(settings.repeat, "time")
    budget = f"the budget of {ASCII.short(settings.budget)} min"
    if reason.startswith(TOO_NOISY):
        return f"It was run {often}, and {budget} leaves too little for another."
    return f"It was run {often}, which was enough, within {budget}."


def about_the_rest(settings: Settings, records: Sequence[Record]) -> str:
    """Says so if not all of the runs were made."""
    planned = len(settings.rows) * settings.seeds * settings.repeat
    made = sum(record.outcome is not Ending.INTERRUPTED for record in records)
    return f"Only {made} of {planned} runs were made." if made < planned else ""
