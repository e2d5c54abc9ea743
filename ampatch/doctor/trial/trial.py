"""Runs a script once for each piece of advice, until it trains: that advice comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ampatch import AmpError
from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.remedies import leave_half
from ampatch.doctor.runs import Run, Seen
from ampatch.doctor.suspects import FALL, fall_of, find_untried, is_collapse
from ampatch.doctor.trial.advice import TENTH, Advice, follow, joined, unedited

MOST_TRIED = 4
ENOUGH = 200  # steps of a run that is tried, or twice as many as it took to break
MOST_JOINED = 3  # pieces of advice that are followed together
PART = 0.8  # of how much it falls in float32, that is learning as well as there
TRAINS, UNTRIED, BREAKS = range(3)  # the order of advice; what is finite and learns less is as if untried


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of advice, and what the run left."""

    rank: int = UNTRIED
    said: str = ""
    seen: Seen | None = None


@dataclass
class Trial:
    """Tries what is said of the first finding, as far as a program can follow it.

    `seen` is the script as it is, `again` the script in float32. Costs a run for each piece of advice that is
    tried; where none is enough, two for each other one that is followed with the first.
    """

    start: Callable[[str, Run], Seen]
    explain: Callable[[Seen], Sequence[Finding]]  # what broke in a traced run
    run: Run
    seen: Seen
    again: Seen
    tried: dict[str, Outcome] = field(default_factory=dict)

    def order(self, finding: Finding) -> Finding:
        """Returns the finding with what came of its advice; what makes the script train comes first."""
        for advice in finding.remedies:
            changed = follow(self.run, [(finding.where, advice)])
            if changed is not None and len(self.tried) < MOST_TRIED:
                self.tried[advice] = self._try(changed)
                if self.tried[advice].rank == TRAINS:
                    break
        more = self._join(finding) if {it.rank for it in self.tried.values()} == {BREAKS} else ()
        order = sorted([*more, *finding.remedies], key=lambda it: self.outcome(it).rank)
        if self.outcome(order[0]).rank != TRAINS and (last := self._last(finding)):
            order.insert(order[0] not in self.tried, last)
        said = tuple(self.outcome(it).said for it in order)
        return replace(finding, remedies=(order[0].removeprefix("or "), *order[1:]), tried=said)

    def outcome(self, advice: str) -> Outcome:
        """Returns what came of advice."""
        return self.tried.get(advice, Outcome())

    def _last(self, finding: Finding) -> str | None:
        """Returns the advice to leave half precision, which was tried by now, if the script learns so."""
        advice, outcome = leave_half(finding), self._judge(self.again)
        learns = outcome.rank == TRAINS and self.fall_of(self.again) >= FALL
        if not advice or self.again.is_half or not learns:
            return None
        self.tried[advice] = outcome
        return advice

    def _join(self, finding: Finding) -> Sequence[str]:
        """Follows what is said of what breaks next as well; returns all of it if the script trains then."""
        advice = next(it for it in finding.remedies if it in self.tried)
        outcome, plan = self.tried[advice], [(finding.where, advice)]
        while outcome.rank == BREAKS and outcome.seen is not None and len(plan) < MOST_JOINED:
            window = outcome.seen.suspects[:MOST_JOINED]
            traced = replace(follow(self.run, plan), traces=True, window=window)
            new = next((it for it in self._next(traced) if it not in plan), None)
            changed = new and follow(self.run, [*plan, new])
            if not changed:
                return ()
            plan.append(new)
            outcome = self._try(changed)
        if outcome.rank == BREAKS:
            return ()
        text = joined(plan)
        self.tried[text] = outcome
        return (text,)

    def _next(self, run: Run) -> Sequence[Advice]:
        """Returns the first advice for each thing that breaks in a run, at the lines of the files on disk."""
        try:
            found = self.explain(self.start("tried", run))
        except AmpError:
            return ()
        return [(unedited(run, it.where), it.remedies[0]) for it in found]

    def _try(self, run: Run) -> Outcome:
        """Runs a script and says what came of it; where a tenth of the rate is not enough, at a hundredth."""
        outcome = self._come_of(run)
        if run.rate == 1.0:
            return outcome
        lower = Outcome() if outcome.rank == TRAINS else self._come_of(replace(run, rate=run.rate * TENTH))
        part, best = ("hundredth", lower) if lower.rank == TRAINS else ("tenth", outcome)
        return replace(best, said=f"at a {part} of the rate {best.said}")

    def _come_of(self, run: Run) -> Outcome:
        """Runs a script and says what came of it."""
        try:
            return self._judge(self.start("tried", replace(run, most=self.wanted)))
        except AmpError:  # it left no report
            return Outcome(BREAKS, "it ends without a report")

    @property
    def wanted(self) -> int:
        """The attempts that a run must make: as many as the script does, but no more than show the fault."""
        first = min(self.seen.suspects, default=0)
        return min(max(len(self.seen.attempts), len(self.again.attempts)), max(ENOUGH, 2 * first))

    def fall_of(self, seen: Seen) -> float:
        """Returns by how much the loss of a run falls, in as many steps as are tried."""
        return fall_of(seen.attempts[: self.wanted])

    def _judge(self, seen: Seen) -> Outcome:
        """Says whether a run trains."""
        attempts = seen.attempts[: self.wanted]
        if len(attempts) < self.wanted:
            return Outcome(BREAKS, f"it ends after {len(attempts)} steps", seen)
        if (first := find_break(attempts)) is not None:
            return Outcome(BREAKS, f"it breaks again, at step {attempts[first].step}", seen)
        fall, best = self.fall_of(seen), self.fall_of(self.again)
        there = "" if math.isnan(best) else f", in float32 by {best:.0%}"
        need = best - FALL if best < FALL else max(FALL, PART * best if there else 0.0)
        if fall >= need:
            so_far = f" for {self.wanted} steps" if self.wanted < len(self.seen.attempts) else ""
            how = f"by {fall:.0%}" if fall <= 1 else "below 0"
            return Outcome(TRAINS, f"the script trains{so_far}, its loss falls {how}", seen)
        return Outcome(UNTRIED, f"all stays finite, but the loss falls by {fall:.0%}{there}", seen)


def find_break(attempts: Sequence[Attempt]) -> int | None:
    """Returns the first attempt that broke, but for the search of a loss scale before the last quarter."""
    search, late = find_untried(attempts), len(attempts) - len(attempts) // 4
    broken = [index for index, it in enumerate(attempts) if not it.is_finite]
    for index in broken:
        it = attempts[index]
        is_search = it.is_dynamic and it.weights and (index in search or (it.loss and index < late))
        if not is_search:
            return index
    return broken[0] if broken and is_collapse(attempts) else None
