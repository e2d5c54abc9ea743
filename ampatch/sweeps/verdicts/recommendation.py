"""Names the level to take: the fastest that is as accurate as O0, where times can be told apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.sweep import (
    AUTOCAST,
    BASELINE,
    Recommendation,
    Settings,
    Sweep,
    SweepRow,
    Verdict,
    find_row,
)
from ampatch.sweeps.verdicts.distance import compared_metrics
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.tools.numbers import ASCII

# Less is not worth a change of numerics, and hardly told apart from chance.
FASTER = 1.02
LESS_MEMORY = 0.05
# From this part of the processors' time in other programs on, times say nothing, however often repeated: with
# two busy loops on two cores a level of 1.5 times the speed of O0 came out at 0.62 of it, twice in a row.
BUSY = 0.25

WITHOUT = "Without O0 there is nothing to compare with"
NOISY = "Too noisy to tell: {best.name} runs at {speed} the speed of O0 ({quartiles} ms a step), and "
ALONE = "Run it on a machine that does nothing else"


class Why(Enum):
    """Why a row is the one to take, or why none is: the sentence to say, with blanks for `facts_about`."""

    NO_O0 = f"{WITHOUT}: add it to --levels."
    O0_NOT_RUN = f"{WITHOUT}, and it was {{o0.reason}}."
    O0_FAILED = f"{WITHOUT}, and it failed: {{o0.reason}}."
    O0_DIVERGED = "O0 itself diverged ({o0.reason}): training in float32 has to work first."
    NO_LEVELS = "There is no level but O0 to choose from."
    NO_TIMES = "No times were measured: a step is timed from the one before, and no run of O0 made two."
    NOT_COMPARED = "No level can be compared with O0: {reasons}."
    TOO_BUSY = f"{NOISY}other programs took {{busy}} of the processors' time. {ALONE}."
    TOO_NOISY = f"{NOISY}their quartiles overlap. {ALONE}, with {{more}}."
    FASTER = (
        "{best.name} runs at {speed} the speed of O0 ({medians} ms a step){memory}, and is as accurate: "
        "{accuracy}."
    )
    O0_UNRELIABLE = "O0 cannot be relied on ({o0.reason}), and no level of its accuracy is faster."
    NONE_FASTER = (
        "No level with the accuracy of O0 is faster by {faster} or more: the fastest{but}, {best.name}, runs "
        "at {speed} the speed of O0."
    )
    NONE_AS_ACCURATE = "No other level has the accuracy of O0: {verdicts}."

    @property
    def is_noise(self) -> bool:
        """Says whether times cannot be told apart."""
        return self in (Why.TOO_BUSY, Why.TOO_NOISY)


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of the row to take, None if there is none, and why; `best` is the row it is about."""

    why: Why
    row: str | None = None
    best: SweepRow | None = None


def recommend(settings: Settings, records: Sequence[RunRecord], rows: Sequence[SweepRow]) -> Recommendation:
    """Recommends the fastest row that is the same as O0, if it is faster by 2 % at least, or else O0.

    Nothing is recommended where times are too noisy to tell. Rows of `autocast` are there to compare with.
    """
    choice = choose(records, rows)
    chosen = find_row(rows, choice.row)
    sentences = [choice.why.value.format(**facts_about(choice, settings, records, rows))]
    if chosen:
        sentences += [
            about_equals(chosen, rows),
            about_autocast(chosen, rows),
            about_seeds(settings, records),
        ]
    sentences += [about_budget(settings, records, choice.why), about_the_rest(settings, records)]
    return Recommendation(choice.row, " ".join(filter(None, sentences)))


def is_too_noisy(sweep: Sweep) -> bool:
    """Says whether nothing is recommended because times cannot be told apart."""
    return choose(sweep.records, sweep.rows).why.is_noise


def choose(records: Sequence[RunRecord], rows: Sequence[SweepRow]) -> Choice:
    """Chooses the row to take."""
    baseline = find_row(rows)
    if obstacle := find_obstacle(baseline, levels(rows)):
        return Choice(obstacle)
    same = same_rows(rows)
    faster = [row for row in same if is_faster(row, baseline)]
    best = max(faster or same, key=lambda row: row.speed, default=None)
    if best and busy_share(records) >= BUSY:
        return Choice(Why.TOO_BUSY, best=best)
    if not faster and any(is_undecided(row, baseline) for row in same):
        return Choice(Why.TOO_NOISY, best=best)
    if faster:
        return Choice(Why.FASTER, best.name, best)
    if baseline.verdict is Verdict.FAILED:
        return Choice(Why.O0_UNRELIABLE)
    return Choice(Why.NONE_FASTER if best else Why.NONE_AS_ACCURATE, BASELINE, best)


def find_obstacle(baseline: SweepRow | None, others: Sequence[SweepRow]) -> Why | None:
    """Returns why no row can be recommended, None if one can."""
    if baseline is None:
        return Why.NO_O0
    obstacles = {
        Why.O0_NOT_RUN: baseline.verdict is Verdict.UNKNOWN,
        Why.O0_FAILED: baseline.outcome is not Ending.FINISHED,
        Why.O0_DIVERGED: baseline.verdict is Verdict.DIVERGED,
        Why.NO_LEVELS: not others,
        Why.NO_TIMES: baseline.step_ms is None,
        Why.NOT_COMPARED: all(row.verdict is Verdict.UNKNOWN for row in others),
    }
    return next((why for why, is_in_the_way in obstacles.items() if is_in_the_way), None)


def facts_about(
    choice: Choice, settings: Settings, records: Sequence[RunRecord], rows: Sequence[SweepRow]
) -> dict[str, object]:
    """Returns what fills the blanks of the sentences in `Why`."""
    baseline, best, others = find_row(rows), choice.best, levels(rows)
    facts = {
        "o0": baseline,
        "best": best,
        "busy": ASCII.percent(round(busy_share(records), 2)),
        "more": "--repeat 5" if settings.budget is None else "a larger --budget",
        "faster": ASCII.percent(FASTER - 1),
        "reasons": ", ".join(dict.fromkeys(row.reason for row in others)),
        "verdicts": ", ".join(f"{row.name} {unknown_or(row)}" for row in others),
    }
    if best is None:
        return facts
    yardsticks = [row.speed for row in rows if is_autocast(row) and row.speed]
    saves = best.memory is not None and best.memory <= 1 - LESS_MEMORY
    return facts | {
        "speed": ASCII.ratio(best.speed),
        "but": " but for autocast" if max(yardsticks, default=0) > best.speed else "",
        "medians": " against ".join(ASCII.number(row.step_ms.median) for row in (best, baseline)),
        "quartiles": " against ".join(map(quartiles, (best, baseline))),
        "memory": f", with {100 * (1 - best.memory):.0f} % less memory" if saves else "",
        "accuracy": accuracy(best),
    }


def busy_share(records: Sequence[RunRecord]) -> float:
    """Returns the part of the processors' time that other programs took in a typical run."""
    shares = [record.busy for record in records if record.busy is not None]
    return statistics.median(shares) if shares else 0.0


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


def about_seeds(settings: Settings, records: Sequence[RunRecord]) -> str:
    """Warns where nothing is known about chance: with one seed, or with seeds that changed nothing."""
    runs = [it for it in records if it.row == BASELINE and not it.failed and it.measured]
    if len({record.seed for record in runs}) < 2:
        more = "--seeds 3" if settings.seeds < 2 else "let all seeds finish"
        return f"With one seed, differences of accuracy by chance cannot be told apart: {more}."
    names = compared_metrics(runs)
    measured = [it.measured for it in runs]
    results = {(it.final_loss, it.first_loss, *map(it.final, names)) for it in measured}
    return "The seeds changed nothing: does the script set its own?" if len(results) == 1 else ""


def about_budget(settings: Settings, records: Sequence[RunRecord], why: Why) -> str:
    """Says how often it was run, where that was left to a budget, and what ended it."""
    if settings.budget is None or any(record.outcome is Ending.INTERRUPTED for record in records):
        return ""
    often = ASCII.plural(settings.repeat, "time")
    budget = f"the budget of {ASCII.short(settings.budget)} min"
    if why.is_noise:
        return f"It was run {often}, and {budget} leaves too little for another."
    return f"It was run {often}, which was enough, within {budget}."


def about_the_rest(settings: Settings, records: Sequence[RunRecord]) -> str:
    """Says so if not all of the runs were made."""
    planned = len(settings.rows) * settings.seeds * settings.repeat
    made = sum(record.outcome is not Ending.INTERRUPTED for record in records)
    return f"Only {made} of {planned} runs were made." if made < planned else ""
