"""What is said beside the recommendation: what it leaves open, and what would tell more."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweeps.records.record import Ending, RunRecord
from ampatch.sweeps.records.sweep import AUTOCAST, BASELINE, Environment, Settings, SweepRow, Verdict
from ampatch.sweeps.verdicts.conditions import FASTER, is_autocast, levels, same_rows
from ampatch.sweeps.verdicts.distance import compared_metrics
from ampatch.tools.numbers import ASCII

SMALL_STEP = 10.0  # ms; in a shorter one there is little arithmetic to speed up


def about_equals(chosen: SweepRow, rows: Sequence[SweepRow]) -> str:
    """Names the rows that may be as fast as the chosen one: where their quartiles overlap."""
    same = [row for row in same_rows(rows) if row is not chosen and not row.disturbed]
    others = [row for row in same if row.step_ms.low <= chosen.step_ms.high]
    if chosen.name == BASELINE or not others:
        return ""
    names = ", ".join(row.name for row in others)
    return f"Times do not tell it apart from {names}."


def about_autocast(chosen: SweepRow, rows: Sequence[SweepRow]) -> str:
    """Says so if torch.autocast is faster than what is recommended."""
    timed = [row for row in rows if is_autocast(row) and row.speed]
    best = min(timed, key=lambda row: row.step_ms.median, default=None)
    speed = chosen.step_ms.median / best.step_ms.median if best and chosen.step_ms else 0
    if speed < FASTER:
        return ""
    but = "" if best.verdict is Verdict.SAME else f", but is {best.verdict} ({best.reason})"
    name = "torch.autocast" if best.name == AUTOCAST else f"torch.autocast ({best.name})"
    return f"{name} runs at {ASCII.ratio(speed)} the speed of {chosen.name}{but}."


def why_nothing_gains(environment: Environment, rows: Sequence[SweepRow]) -> str:
    """Says why levels are slower than O0, as far as the device and the times show it."""
    names, half = [row.name for row in levels(rows) if row.step_ms], environment.half
    slow, on_cpu = [name for name in names if not is_bfloat16(name)], environment.device == "cpu"
    step = next((row.step_ms.median for row in rows if row.name == BASELINE and row.step_ms), SMALL_STEP)
    small = f"a step of {ASCII.number(step)} ms has only small products"
    reasons = {
        f"float16 is slow on a CPU: {', '.join(slow)}": on_cpu and slow,
        "O6 only emulates float8 on a CPU": on_cpu and any(name.startswith("O6") for name in names),
        "this CPU has no instructions for bfloat16": on_cpu and half is not None and "bf16" not in half,
        f"{small}, and casts cost more than those gain": step < SMALL_STEP,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return f" ({'; '.join(found)})" if found else ""


def is_bfloat16(name: str) -> bool:
    """Says whether the half type of a row is bfloat16, by its level or an option of it."""
    return "dtype=bfloat16" in name or (name[:2] in ("O4", "O5", "O6") and "dtype=float16" not in name)


def about_metrics(rows: Sequence[SweepRow], records: Sequence[RunRecord]) -> str:
    """Says so if no metric was compared, and which line of the script would change that."""
    runs = [it for it in records if not it.failed]
    was_judged = any(row.verdict in (Verdict.SAME, Verdict.WORSE) for row in rows)
    if not was_judged or compared_metrics(runs):
        return ""
    name, text = next((it.printed for it in runs if it.printed), ("accuracy", ""))
    but = f", and not what the script prints: {text!r}" if text else ""
    only = f"Only the training loss was compared{but}."
    return f"{only} The line amp.report({name}=...) in the script (import ampatch as amp) changes that."


def about_disturbed(rows: Sequence[SweepRow]) -> str:
    """Names the rows as accurate as O0 whose speed is not known, since they ran under other conditions."""
    found = [row for row in same_rows(rows) if row.disturbed]
    names = ", ".join(row.name for row in found)
    said = f"The speed of {names} is not known, under other conditions than O0: "
    return f"{said}{found[0].disturbed}." if found else ""


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


def about_budget(settings: Settings, records: Sequence[RunRecord], is_noise: bool) -> str:
    """Says how often it was run, where that was left to a budget, and what ended it."""
    if settings.budget is None or any(record.outcome is Ending.INTERRUPTED for record in records):
        return ""
    often = ASCII.plural(settings.repeat, "time")
    budget = f"the budget of {ASCII.short(settings.budget)} min"
    if is_noise:
        return f"It was run {often}, and {budget} leaves too little for another."
    return f"It was run {often}, which was enough, within {budget}."


def about_the_rest(settings: Settings, records: Sequence[RunRecord]) -> str:
    """Says so if not all of the runs were made."""
    planned = len(settings.rows) * settings.seeds * settings.repeat
    made = sum(record.outcome is not Ending.INTERRUPTED for record in records)
    return f"Only {made} of {planned} runs were made." if made < planned else ""
