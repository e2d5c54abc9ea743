"""Names the level to take: the fastest that is as accurate as O0, where times can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ampatch.sweeps.columns import column_of, divide
from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.sweep import (
    BASELINE,
    Environment,
    Recommendation,
    Settings,
    Sweep,
    SweepRow,
    Verdict,
    find_row,
)
from ampatch.sweeps.verdicts import conditions, remarks
from ampatch.sweeps.verdicts.conditions import FASTER, calmest, is_autocast, levels, same_rows
from ampatch.sweeps.verdicts.metric_names import most_important
from ampatch.tools.numbers import ASCII

LESS_MEMORY = 0.05
# Other programs empty the caches, which costs half types more: where they took 80 % of a run's time, O4
# needed 1.4 times the processors' time of O0, and on an idle machine as much. What is beyond that is its own.
CLEARLY_MORE = 1.5

WITHOUT = "Without O0 there is nothing to compare with"
NOISY = "Too noisy to tell: {best.name} runs at {speed} the speed of O0 ({quartiles} ms a step), and "
FASTEST = "O0 is the fastest here: nothing gains{because}. "
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
    BUSY_BUT_CLEAR = (
        f"{FASTEST}{{best.name}} runs at {{speed}} the speed of O0 ({{quartiles}} ms a step), and every "
        "level needs far more of the processors' time as well. How much exactly cannot be told: {unsure}."
    )
    TOO_BUSY = f"{NOISY}{{lost}}. {ALONE}."
    DISTURBED = f"{{disturbed}} {ALONE}, with {{more}}."
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
    O0_FASTEST = f"{FASTEST}{NONE_FASTER}"
    NONE_AS_ACCURATE = "No other level has the accuracy of O0: {verdicts}."

    @property
    def is_noise(self) -> bool:
        """Says whether times cannot be told apart."""
        return self in (Why.TOO_BUSY, Why.DISTURBED, Why.TOO_NOISY)


@dataclass(frozen=True, slots=True)
class Choice:
    """The name of the row to take, None if there is none, and why; `best` is the row it is about."""

    why: Why
    row: str | None = None
    best: SweepRow | None = None


def recommend(
    settings: Settings, environment: Environment, records: Sequence[RunRecord], rows: Sequence[SweepRow]
) -> Recommendation:
    """Recommends the fastest row that is the same as O0, if it is faster by 2 % at least, or else O0.

    Nothing is recommended where times are too noisy to tell. Rows of `autocast` are there to compare with.
    """
    choice = choose(records, rows)
    chosen = find_row(rows, choice.row)
    facts = facts_about(choice, settings, records, rows)
    facts["because"] = remarks.why_nothing_gains(environment, rows)
    sentences = [choice.why.value.format(**facts)]
    if chosen:
        sentences += [
            remarks.about_equals(chosen, rows),
            remarks.about_disturbed(rows),
            remarks.about_autocast(chosen, rows),
            f"Times were taken of {len(settings.devices)} runs side by side: one by one they are surer."
            if len(settings.devices) > 1
            else "",
            remarks.about_seeds(settings, records),
        ]
    sentences += [
        remarks.about_budget(settings, records, choice.why.is_noise),
        remarks.about_metrics(rows, records),
        remarks.about_the_rest(settings, records),
    ]
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
    faster = [row for row in same if row.speed and conditions.is_faster(row, baseline)]
    best = min(faster or same, key=lambda row: row.step_ms.median, default=None)
    disturbed = not faster and any(row.disturbed for row in same)
    if best and (disturbed or calmest(records).lost[0] >= conditions.BUSY):
        if not faster and all(takes_more(row, baseline, records) for row in same):
            return Choice(Why.BUSY_BUT_CLEAR, best=best)
        return Choice(Why.DISTURBED if disturbed else Why.TOO_BUSY, best=best)
    if not faster and any(conditions.is_undecided(row, baseline) for row in same):
        return Choice(Why.TOO_NOISY, best=best)
    if faster:
        return Choice(Why.FASTER, best.name, best)
    if baseline.verdict is Verdict.FAILED:
        return Choice(Why.O0_UNRELIABLE)
    if best is None:
        return Choice(Why.NONE_AS_ACCURATE, BASELINE)
    fastest = max(row.speed for row in rows if row.speed and row is not baseline)
    return Choice(Why.NONE_FASTER if fastest * FASTER > 1 else Why.O0_FASTEST, BASELINE, best)


def takes_more(row: SweepRow, baseline: SweepRow, records: Sequence[RunRecord]) -> bool:
    """Says whether a level is slower than O0 by its quartiles, and by far by what it needs of the processors.

    That does not grow while it waits for others. A GPU's work is not in it.
    """
    own, other = (
        column_of("processor_ms").of_runs(
            [it.measured for it in records if it.row == one.name and not it.failed and it.measured]
        )
        for one in (row, baseline)
    )
    on_gpu = any(it.measured and it.measured.device != "cpu" for it in records)
    slower = row.step_ms.low > baseline.step_ms.high
    return slower and not on_gpu and None not in (own, other) and own >= CLEARLY_MORE * other


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
        "disturbed": remarks.about_disturbed(rows),
        "more": "--repeat 5" if settings.budget is None else "a larger --budget",
        "faster": ASCII.percent(FASTER - 1),
        "reasons": ", ".join(dict.fromkeys(row.reason for row in others)),
        "verdicts": ", ".join(f"{row.name} {unknown_or(row)}" for row in others),
    }
    if best is None:
        return facts
    yardsticks = [row.speed for row in rows if is_autocast(row) and row.speed]
    saves = best.memory is not None and best.memory <= 1 - LESS_MEMORY
    lost = conditions.write_lost(*calmest(records).lost)
    return facts | {
        "lost": lost,
        "unsure": next((row.disturbed for row in same_rows(rows) if row.disturbed), lost),
        "speed": ASCII.ratio(divide(baseline.step_ms.median, best.step_ms.median)),
        "but": " but for autocast" if max(yardsticks, default=0) > (best.speed or 0) else "",
        "medians": " against ".join(ASCII.number(row.step_ms.median) for row in (best, baseline)),
        "quartiles": " against ".join(map(quartiles, (best, baseline))),
        "memory": f", with {100 * (1 - best.memory):.0f} % less memory" if saves else "",
        "accuracy": accuracy(best),
    }


def quartiles(row: SweepRow) -> str:
    """Writes between which times the middle half of the steps lies."""
    return f"{ASCII.number(row.step_ms.low)} to {ASCII.number(row.step_ms.high)}"


def unknown_or(row: SweepRow) -> str:
    """Writes the verdict about a row in a sentence."""
    return f"unknown ({row.reason})" if row.verdict is Verdict.UNKNOWN else row.verdict.value


def accuracy(row: SweepRow) -> str:
    """Writes the metric that matters most, or the loss where none is reported, beside that of O0."""
    compared = [name for name, it in row.metrics.items() if it.spreads is not None]
    name = most_important(compared) or "loss"
    it = row.metrics[name] if compared else row.loss
    far = "" if it.unit == "percent" else f" ({ASCII.signed(it.spreads)} spreads)"
    return f"{name} {ASCII.short(it.value)} against {ASCII.short(it.baseline)}{far}"
