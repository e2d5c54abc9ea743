"""Where nothing breaks: what comes of advice on silent faults, and what makes a loss fall that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.remedies import leave_half, take_bfloat16
from ampatch.doctor.rules.table import explain
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.suspects import has_scaler
from ampatch.doctor.trial.trial import Trial, said_of_fall

LEARNS = 0.3  # of the loss, by which it falls more: less is noise, as that of a game
MOST_LOOKED_AT = 2


def can_try(fault: Finding, run: ScriptRun) -> bool:
    """Says whether a program can do something of what is said of a silent fault."""
    return any(fix.change(run) is not None for fix in fault.remedies)


def falls_on(attempts: Sequence[Attempt]) -> bool:
    """Says whether a loss falls from each quarter of a run to the next."""
    part = len(attempts) // 4
    sums = [sum(it.value for it in attempts[part * quarter : part * (quarter + 1)]) for quarter in range(4)]
    return sums == sorted(sums, reverse=True)


def find_what_learns(
    trial: Trial, harmless: Sequence[Finding], half: str, autocast: str | None
) -> list[Finding]:
    """Returns the finding whose advice makes the loss fall, none where none does.

    That is of numbers that were made and reached nothing, or of half precision if the loss falls in float32;
    `half` is its type, `autocast` the device for which `torch.autocast` was on. Costs a trial for each.
    """
    first = trial.fall_of(trial.seen)
    for it in (*suspects(trial, harmless), *half_alone(trial, half, autocast)):
        tries = replace(trial, tried={})
        found = tries.order(it)
        seen = tries.outcome(found.remedies[0]).seen
        if seen is not None and trial.fall_of(seen) >= first + LEARNS and falls_on(seen.attempts):
            return [replace(found, facts=found.facts | {"flat": True})]
    return []


def suspects(trial: Trial, harmless: Sequence[Finding]) -> Iterator[Finding]:
    """Yields what was made and reached nothing, as if it were to blame."""
    survives = trial.fall_of(trial.again) >= LEARNS
    for it in harmless[:MOST_LOOKED_AT]:
        found = explain(replace(it, float32_survives=survives))
        yield replace(found, why=f"{found.why} Nothing broke because of it, but the loss does not fall.")


def half_alone(trial: Trial, half: str, autocast: str | None) -> Iterator[Finding]:
    """Yields the finding that half precision keeps a loss from falling."""
    first, best = trial.fall_of(trial.seen), trial.fall_of(trial.again)
    if best < first + LEARNS or not falls_on(trial.again.attempts):
        return
    it = Finding(
        *("", trial.seen.attempts[0].step, "loss", None, "", "training", None),
        dtype=half,
        autocast=autocast,
        float32_survives=True,
        facts={"has_scaler": has_scaler(trial.seen.attempts)},
    )
    remedies = tuple(filter(None, (take_bfloat16(it), leave_half(it))))
    why = f"nothing broke, and the loss {said_of_fall(first)}; in float32 it {said_of_fall(best)}."
    yield replace(it, cause="learns in float32 alone", why=why, remedies=remedies)
