"""Runs a script once for each fix, until it trains: that fix comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ampatch import AmpError
from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import NOT_TRIED, Both, Fix, Float32, Paste, Rank, Tried, join
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.remedies import leave_half, leave_own_half, take_bfloat16, take_finer
from ampatch.doctor.rules.table import explain
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Seen
from ampatch.doctor.suspects import (
    FALL,
    ends_of,
    fall_of,
    find_untried,
    has_scaler,
    is_collapse,
    learns_less,
)

MOST_TRIED = 4
ENOUGH = 200  # steps of a run that is tried, from the one that broke on
MOST_JOINED = 3  # fixes that are made together
PART = 0.8  # of how much it falls in float32, that is learning as well as there
PAUSE = 1 / 3  # of its steps that a run skips while its scale searches: it begins later than float32
NEAR = 0.05  # of the loss, by which it falls more or less than in float32: as well
Explain = Callable[[Seen, ScriptRun], Sequence[Finding]]  # what broke in a traced run
Parts = tuple[tuple[str | None, Fix], ...]  # of fixes at their lines


@dataclass(frozen=True, slots=True)
class TriedFix:
    """What came of a fix, and what the run left."""

    tried: Tried = NOT_TRIED
    seen: Seen | None = None
    gap: float = 0.0  # by how much more the loss falls than in float32, or less, if by more than `NEAR`

    @property
    def rank(self) -> Rank:
        return self.tried.rank

    def after(self, fix: Fix) -> TriedFix:
        return replace(self, tried=replace(self.tried, said=fix.how + self.tried.said))


@dataclass
class Trial:
    """Tries what is said of the first finding, as far as a program can follow it.

    `seen` is the script as it is, `again` the script in float32. Costs a run for each fix that is
    tried; where none is enough, two for each other one that is made with the first.
    """

    start: Callable[[str, ScriptRun], Seen]
    explain: Explain
    run: ScriptRun
    seen: Seen
    again: Seen
    can_afford: Callable[[], bool] = field(default_factory=lambda: lambda: True)
    fault: int = 0  # the attempt that broke, which each run has to pass
    least: int = 0
    is_strict: bool = False  # whether a loss has to end near that of float32
    tried: dict[Fix, TriedFix] = field(default_factory=dict)

    def order(self, finding: Finding) -> Finding:
        """Returns the finding with what came of its fixes; what makes the script train comes first."""
        steps = [attempt.step for attempt in self.seen.attempts]
        self.fault = max(self.least, steps.index(finding.step) if finding.step in steps else len(steps))
        for fix in finding.remedies:
            is_due = len(self.tried) < MOST_TRIED and self.can_afford()
            if is_due and fix.change(self.run) is not None:
                self.tried[fix] = self._try(fix)
                if self.tried[fix].rank == Rank.TRAINS and fix.is_exact and self.tried[fix].gap >= 0:
                    break
        ranks = {outcome.rank for outcome in self.tried.values()}
        more = self._join(finding) if ranks == {Rank.BREAKS} else ()
        order = sorted([*more, *finding.remedies], key=self._evidence)
        if self.outcome(order[0]).rank != Rank.TRAINS and (last := self._last(finding)):
            order.insert(not isinstance(last, Paste) and order[0] not in self.tried, last)
        tried = tuple(self.outcome(fix).tried for fix in order)
        others = [outcome.rank for fix, outcome in self.tried.items() if not isinstance(fix, Float32)]
        is_last = bool(others) and Rank.TRAINS not in others
        said = (replace(fix, is_last=is_last) if isinstance(fix, Float32) else fix for fix in order)
        return replace(finding, remedies=tuple(said), tried=tried)

    def _evidence(self, fix: Fix) -> tuple[object, ...]:
        """Returns what fixes are ordered by: of those that train the nearest to float32, then exact ones."""
        outcome = self.outcome(fix)
        # A loss of other numbers, as of what is clamped, may fall more and mean nothing.
        distance = -min(outcome.gap, 0.0) if fix.is_exact else abs(outcome.gap)
        return outcome.rank, distance, outcome.rank == Rank.TRAINS and not fix.is_exact

    def outcome(self, fix: Fix) -> TriedFix:
        return self.tried.get(fix, TriedFix())

    def _last(self, finding: Finding) -> Fix | None:
        """Returns the fix to leave half precision, which was tried by now, if the script learns so."""
        if finding.facts.get("advice"):  # an error that says what is wrong in the script
            return None
        fix, outcome = leave_own_half(finding) or leave_half(finding), self._judge(self.again)
        learns = outcome.rank == Rank.TRAINS and self.fall_of(self.again) >= FALL
        if fix is None or self.again.is_half or not learns:
            return None
        self.tried[fix] = outcome
        return fix

    def _join(self, finding: Finding) -> Sequence[Fix]:
        """Makes the first fix of what breaks next as well; returns all of them if the script trains then."""
        first = next(fix for fix in finding.remedies if fix in self.tried)
        outcome, parts = self.tried[first], ((finding.where, first),)
        while outcome.rank == Rank.BREAKS and outcome.seen is not None and len(parts) < MOST_JOINED:
            if not self.can_afford():
                return ()
            window = outcome.seen.suspects[:MOST_JOINED]
            run = Both(parts).change(self.run)
            traced = run and replace(run, traces=True, window=window)
            new = next((fix for fix in self._next(traced) if fix not in parts), None) if traced else None
            changed = new and Both((*parts, new)).change(self.run)
            if new is None or changed is None:
                return ()
            parts = (*parts, new)
            outcome = self._come_of(changed)
        if outcome.rank == Rank.BREAKS:
            return ()
        fix = join(parts)
        self.tried[fix] = outcome
        return (fix,)

    def _next(self, run: ScriptRun) -> Parts:
        """Returns the first fix for each thing that breaks in a run."""
        try:
            findings = self.explain(self.start("tried", run), run)
        except AmpError:
            return ()
        return tuple((finding.where, finding.remedies[0]) for finding in findings)

    def _try(self, fix: Fix) -> TriedFix:
        """Runs a script with a fix and says what came of it; where it is not enough, with the next one."""
        outcome = self._come_of(fix.change(self.run))
        found, now = outcome.after(fix), fix
        while found.rank != Rank.TRAINS and self.can_afford() and (now := now.next()) is not None:
            outcome = self._come_of(now.change(self.run))
            if outcome.rank == Rank.TRAINS:
                found = outcome.after(now)
        return found

    def _come_of(self, run: ScriptRun) -> TriedFix:
        try:
            return self._judge(self.start("tried", replace(run, most=self.wanted)))
        except AmpError:  # it left no report
            return TriedFix(Tried(Rank.BREAKS, "it ends without a report"))

    @property
    def wanted(self) -> int:
        """The attempts that a run must make: as many as the script does, but no more than pass the fault."""
        return min(max(len(self.seen.attempts), len(self.again.attempts)), self.fault + ENOUGH)

    def fall_of(self, seen: Seen) -> float:
        """Returns by how much the loss of a run falls, in as many steps as are tried."""
        return fall_of(seen.attempts[: self.wanted])

    def _judge(self, seen: Seen) -> TriedFix:
        """Says whether a run trains."""
        attempts, lasting = seen.attempts[: self.wanted], self.seen.attempts[self.fault + 1 : self.fault + 2]
        lasts = any(not attempt.is_finite for attempt in lasting)
        if (first := find_break(attempts, self.seen.attempts[: self.fault], lasts)) is not None:
            return TriedFix(Tried(Rank.BREAKS, f"it breaks again, at step {attempts[first].step}"), seen)
        if seen.is_late:
            return TriedFix(
                Tried(Rank.UNTRIED, f"all stays finite for {len(attempts)} steps, and it was ended"), seen
            )
        if len(attempts) < self.wanted:
            return TriedFix(Tried(Rank.BREAKS, f"it ends after {len(attempts)} steps"), seen)
        if late := self._find_lateness(attempts):
            return TriedFix(Tried(Rank.UNTRIED, f"all stays finite, but {late}"), seen)
        fall, best = self.fall_of(seen), self.fall_of(self.again)
        there = "" if math.isnan(best) else f", in float32 it {said_of_fall(best)}"
        need = best - FALL if best < FALL else max(FALL, PART * best if there else 0.0)
        loss = f"loss {said_of_fall(fall)}{there}"
        is_less = self.is_strict and learns_less(attempts, self.again.attempts[: self.wanted])
        if fall >= need and not is_less:
            so_far = f" for {self.wanted} steps" if self.wanted < len(self.seen.attempts) else ""
            gap = fall - best if there else 0.0
            tried = Tried(Rank.TRAINS, f"the script trains{so_far}, its {loss}")
            return TriedFix(tried, seen, gap if abs(gap) > NEAR else 0.0)
        return TriedFix(Tried(Rank.UNTRIED, f"all stays finite, but the {loss}"), seen)

    def _find_lateness(self, attempts: Sequence[Attempt]) -> str:
        """Says that a run skipped many steps, and ends with a larger loss than float32 for it; else ""."""
        skipped, there = sum(map(is_skip, attempts)), self.again.attempts[: self.wanted]
        if skipped <= PAUSE * len(attempts) or not all(attempt.is_finite for attempt in there):
            return ""
        (_, end), (begin, best) = ends_of(attempts), ends_of(there)
        if end - best <= (1 - PART) * (begin - best):
            return ""
        steps = f"{skipped} of {len(attempts)} steps are skipped"
        return f"{steps}, and its loss ends at {end:.3g}, in float32 at {best:.3g}"


def said_of_fall(fall: float) -> str:
    """Says by how much a loss falls.

    >>> said_of_fall(0.88), said_of_fall(-0.001), said_of_fall(-0.5), said_of_fall(1.2)
    ('falls by 88%', 'does not fall', 'rises by 50%', 'falls below 0')
    """
    if abs(fall) < 0.005:
        return "does not fall"
    return "falls below 0" if fall > 1 else f"{'falls' if fall > 0 else 'rises'} by {abs(fall):.0%}"


def find_break(attempts: Sequence[Attempt], before: Sequence[Attempt], lasts: bool = False) -> int | None:
    """Returns the first attempt that broke, but for the search of a loss scale.

    At the fault nothing may break. In the last quarter a scale that was good may be too large as often as in
    the script as it is, `before` its fault. A fault that `lasts` breaks more than one step.
    """
    search, fault, late = find_untried(attempts), len(before), len(attempts) - len(attempts) // 4
    broken = [index for index, attempt in enumerate(attempts) if not attempt.is_finite]
    for index in broken:
        attempt = attempts[index]
        is_search = attempt.is_dynamic and attempt.weights and index in search
        is_fault = index == fault > 0 and not (lasts and index + 1 not in broken)
        if not is_search and (is_fault or not is_skip(attempt)):
            return index
    usual = [
        attempt
        for index, attempt in enumerate(before)
        if is_skip(attempt) and index not in find_untried(before)
    ]
    again = [index for index in broken if index >= late and index not in search]
    if len(again) > len(usual) + lasts:
        return again[0]
    return broken[0] if broken and is_collapse(attempts) else None


def is_skip(attempt: Attempt) -> bool:
    """Says whether a step was skipped, and nothing but a scale was too large."""
    return not attempt.is_finite and attempt.is_dynamic and attempt.loss and attempt.weights


LEARNS = 0.3  # of the loss, by which it falls more: less is noise, as that of a game
MOST_LOOKED_AT = 2


def can_try(fault: Finding, run: ScriptRun) -> bool:
    """Says whether a program can do something of what is said of a silent fault."""
    return any(fix.change(run) is not None for fix in fault.remedies)


def with_other_types(fault: Finding) -> Finding:
    """Returns a fault with what else may help, where the line that costs accuracy may be another."""
    fixes = take_bfloat16(fault), take_finer(fault)
    return replace(fault, remedies=tuple(dict.fromkeys((*fault.remedies, *filter(None, fixes)))))


def falls_on(attempts: Sequence[Attempt]) -> bool:
    """Says whether a loss falls from each quarter of a run to the next."""
    part = len(attempts) // 4
    sums = [
        sum(attempt.value for attempt in attempts[part * quarter : part * (quarter + 1)])
        for quarter in range(4)
    ]
    return sums == sorted(sums, reverse=True)


def find_what_learns(
    trial: Trial, harmless: Sequence[Finding], half: str, autocast: str | None
) -> list[Finding]:
    """Returns the finding whose advice makes the loss fall, none where none does.

    That is of numbers that were made and reached nothing, or of half precision if the loss falls in float32;
    `half` is its type, `autocast` the device for which `torch.autocast` was on. Costs a trial for each.
    """
    first = trial.fall_of(trial.seen)
    for finding in (*suspects(trial, harmless), *half_alone(trial, half, autocast)):
        tries = replace(trial, tried={})
        tried = tries.order(finding)
        outcome = tries.outcome(tried.remedies[0])
        seen = outcome.seen
        is_near = trial.is_strict and outcome.rank is Rank.TRAINS
        learns = seen and trial.fall_of(seen) >= first + LEARNS and falls_on(seen.attempts)
        if is_near or learns:
            return [replace(tried, facts=tried.facts | {"flat": True})]
    return []


def suspects(trial: Trial, harmless: Sequence[Finding]) -> Iterator[Finding]:
    """Yields what was made and reached nothing, as if it were to blame."""
    survives = trial.fall_of(trial.again) >= LEARNS
    for finding in harmless[:MOST_LOOKED_AT]:
        explained = explain(replace(finding, float32_survives=survives))
        yield replace(
            explained, why=f"{explained.why} Nothing broke because of it, but the loss does not fall."
        )


def half_alone(trial: Trial, half: str, autocast: str | None) -> Iterator[Finding]:
    """Yields the finding that half precision keeps a loss from falling."""
    first, best = trial.fall_of(trial.seen), trial.fall_of(trial.again)
    if not trial.is_strict and (best < first + LEARNS or not falls_on(trial.again.attempts)):
        return
    finding = Finding(
        *("", trial.seen.attempts[0].step, "loss", None, "", "training", None),
        dtype=half,
        autocast=autocast,
        float32_survives=True,
        facts={"has_scaler": has_scaler(trial.seen.attempts), "halved": trial.seen.halved},
    )
    fixes = take_bfloat16(finding), take_finer(finding), leave_own_half(finding) or leave_half(finding)
    remedies = tuple(filter(None, fixes))
    why = f"nothing broke, and the loss {said_of_fall(first)}; in float32 it {said_of_fall(best)}."
    yield replace(finding, cause="learns in float32 alone", why=why, remedies=remedies)
