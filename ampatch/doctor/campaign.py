"""The runs of a script that make a report: one that is watched, one that is traced, one in float32."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ampatch import AmpError
from ampatch.doctor.finding import Finding, Report, merge
from ampatch.doctor.instruments.tape import QUOTIENTS, Origin
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.errors import ScriptError, read_error
from ampatch.doctor.rules.table import explain
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Launch, Seen, start_process
from ampatch.doctor.silent.gradients import compare_gradients, pick_sample
from ampatch.doctor.silent.notes import examine_silent
from ampatch.doctor.suspects import (
    FEWEST,
    describe_scale,
    ends_of,
    fall_of,
    find_hidden,
    find_suspects,
    has_scaler,
    is_flat,
    learns_less,
    leave_out_mended,
    pick_suspects,
    plan_looks,
    plan_window,
)
from ampatch.doctor.text.source import Change, line_before, place_of
from ampatch.doctor.trial import (
    ENOUGH,
    Explain,
    Trial,
    can_try,
    find_what_learns,
    said_of_fall,
    with_other_types,
)
from ampatch.tools.folder import temporary_folder

MOST_TRACED = 8  # attempts of one run
# CPU of all runs: times that of the watched one, which is about 1.6 times the script's own, and seconds.
MOST_TIMES, MOST_SECONDS = 6.0, 20.0
LONG = 300.0  # CPU seconds of the watched run
SHORT = 60.0  # CPU seconds of a watched run that float32 is compared with to its end
SPREADS = 2.0  # times what other random numbers make of a loss
SECONDS = 600.0  # of the watched run; the others, which do more, may take twice as long
WHY = {
    "watched": "the script as it is",
    "traced": "each operation where something broke, or in the first steps",
    "float32": "the same in float32",
    "drawn anew": "the same in float32 with other random numbers",
    "tried": "with advice",
}
FAULT = "a fault of ampatch, please report it"
ALWAYS_TRACED = 2  # first attempts, where nothing is wrong: for what is harmless


@dataclass
class Campaign:
    """Runs a script as often as it takes; `runs` counts, `unknown` says what could not be known."""

    run: ScriptRun
    launch: Launch = start_process
    tries: bool = False  # whether advice is tried
    tell: Callable[[str], None] | None = None  # hears of each run
    seconds: float | None = None  # that the watched run may take
    runs: int = 0
    unknown: list[str] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)  # of the last run of a name
    ended: dict[str, ScriptError] = field(default_factory=dict)  # how runs ended that raised, by name
    first_in_float32: Seen | None = None
    enough: int | None = None  # attempts in float32, of a long script
    spent: list[float] = field(default_factory=list)  # CPU seconds of each run
    begun: float = 0.0  # when the latest run began
    silent: list[Finding] = field(default_factory=list)  # of the watched and the traced run

    def report(self) -> Report:
        """Watches the script, traces what broke, asks whether float32 survives, and tries what helps."""
        with temporary_folder("doctor") as folder:
            self.run = replace(self.run, samples=str(folder))
            return self._report()

    def _report(self) -> Report:
        seen = self._start("watched", replace(self.run, grows=True, seconds=self.seconds))
        if self.seconds:
            self.run = replace(self.run, seconds=2 * self.seconds)
        self._say_what_was_not_watched(seen)
        if "watched" in self.ended:
            seen = replace(seen, is_open=True)
        attempts = seen.attempts
        sample = pick_sample(seen.shares, attempts)
        window = pick_suspects(attempts, seen.suspects, MOST_TRACED) or range(ALWAYS_TRACED)[: len(attempts)]
        window = tuple(sorted({*window, *plan_window(attempts, sample)}))
        looks = plan_looks(attempts) if self.spent[0] <= LONG else ()
        run = replace(self.run, traces=True, window=window, sample=sample)
        run = replace(run, looks=looks, is_brief=not seen.suspects, raises="watched" in self.ended)
        origins = origins_of(self._start("traced", run)) if window else ()
        findings, hidden = findings_in(seen, origins), find_hidden(origins)
        if findings or hidden or sample is not None:
            again = self._in_float32(seen, hidden, None if findings else sample)
            behind = merge(attempts, find_behind(again, hidden))
            findings = sorted(behind + findings, key=order_of)
        elif self.ended.get("watched") and self.ended["watched"].is_raised:
            again = self._in_float32(seen, (), None)
        if findings:
            findings = self._explain(findings, seen, again)
        elif sample is not None:
            faults, reason = compare_gradients(self.run.samples, sample)
            more = {"autocast": self.seen["traced"].autocast, "float32_survives": True, "dtype": "float16"}
            self.silent += [replace(fault, **more) for fault in faults]
            self.unknown += [reason] if reason else []
        if "watched" in self.ended and not findings and (of_half := self._of_half_alone(seen)):
            findings = self._try([explain(of_half)], lambda *_: (), seen, again)
        harmless = merge(attempts, [origin for origin in origins if not origin.has_reached])
        silent, learnt = self._examine_silent(seen, findings, harmless)
        findings = findings or learnt
        untraced = self._say_what_was_not_traced(seen, origins, findings)
        self._say_how_runs_ended(untraced, findings)
        return Report(
            *(tuple(findings), tuple(map(explain, harmless)), describe_scale(attempts), self.runs),
            tuple(self.unknown),
            silent=silent,
            untraced=untraced,
        )

    def _examine_silent(
        self, seen: Seen, findings: Sequence[Finding], harmless: Sequence[Finding]
    ) -> tuple[tuple[Finding, ...], list[Finding]]:
        """Returns the silent faults, or else what would have the script learn, if it does not."""
        attempts = seen.attempts
        own = {"halved": seen.halved, "has_scaler": has_scaler(attempts)}
        faults = [replace(fault, facts=own | fault.facts) for fault in self.silent]
        is_due = self.tries and bool(attempts) and not (findings or self.ended)
        is_long = is_due and len(attempts) >= FEWEST
        less = functools.cache(lambda: self._said_of_less(attempts) if is_long else "")
        silent = tuple(examine_silent(faults, attempts, findings, bool(self.ended), lambda: bool(less())))
        if silent and less():
            silent = (replace(silent[0], facts=silent[0].facts | {"less": less()}), *silent[1:])
        tryable = next((fault for fault in silent if can_try(fault, self.run)), None)
        if less() and (chosen := tryable or next(iter(silent), None)):
            tryable = with_other_types(chosen)
            silent = tuple(tryable if fault is chosen else fault for fault in silent)
        if not is_due or not (tryable or less() or (is_flat(attempts) and not silent)):
            return silent, []
        last = self.compared - ENOUGH  # what a trial has to pass, at least
        more = {"least": last, "is_strict": bool(less())}
        trial = Trial(self._start, lambda *_: (), self.run, seen, self._alone(), self.can_afford, **more)
        if silent:
            tried = [trial.order(fault) if fault is tryable else fault for fault in silent]
            return tuple(sorted(tried, key=lambda fault: not fault.is_mended)), []
        half, autocast = str(seen.growth["half"]), self.seen["traced"].autocast
        return (), find_what_learns(trial, harmless, half, autocast)

    def _said_of_less(self, attempts: Sequence[Attempt]) -> str:
        """Says by how much less a loss falls than in float32, if it does clearly; else "".

        That is more than it is for other random numbers: one more run in float32 shows how much that is.
        """
        ours, alone = attempts[: self.compared], self._alone()
        if not learns_less(ours, alone.attempts) or not self.can_afford():
            return ""
        other = self._start("drawn anew", replace(self._run_in_float32, seed=1))
        ends = [ends_of(run)[1] for run in (ours, alone.attempts, other.attempts)]
        if not ends[0] - ends[1] > SPREADS * abs(ends[2] - ends[1]):
            return ""
        here, there = (f"{said_of_fall(fall_of(run))}, to" for run in (ours, alone.attempts))
        return f"The loss {here} {ends[0]:.3g}; in float32 it {there} {ends[1]:.3g}."

    def _explain(self, findings: Sequence[Finding], seen: Seen, again: Seen) -> list[Finding]:
        """Returns findings with their causes and what to do, which is tried for the first."""
        survives = self._survives(seen, again)
        is_of_half = survives and "traced" in self.ended and "float32" not in self.ended

        def explained(findings: Sequence[Finding]) -> list[Finding]:
            keep = modules_to_keep(findings, again.oversized) if survives else ()
            own = {"halved": seen.halved, "has_scaler": has_scaler(seen.attempts), "is_half": seen.is_half}
            facts = seen.growth | own
            facts |= {"up_to": again.attempts[-1].step} if survives and self.enough else {}
            more = {"float32_survives": survives, "keep": keep}
            return [
                explain(
                    replace(
                        finding,
                        **more,
                        facts=finding.facts | facts | {"places": places_of(finding, findings)},
                    )
                )
                for finding in findings
                if is_of_half or "error" not in finding.facts
            ]

        def broken(tried: Seen, run: ScriptRun) -> list[Finding]:
            there = findings_in(tried, origins_of(tried))
            return explained([replace(finding, **places_before(finding, run.changes)) for finding in there])

        return self._try(explained(findings), broken, seen, again)

    def _try(self, findings: list[Finding], broken: Explain, seen: Seen, again: Seen) -> list[Finding]:
        """Returns findings with what came of the fixes of the first."""
        if findings and self.tries:
            trial = Trial(self._start, broken, self.run, seen, again, self.can_afford)
            findings[0] = trial.order(findings[0])
        return findings

    def _say_what_was_not_watched(self, seen: Seen) -> None:
        if not seen.attempts and not seen.is_open:
            self.unknown.append(
                "the script made no step of an optimizer, in its own process: nothing was watched"
            )
        if seen.is_late:
            self.unknown.append(
                f"what comes after {len(seen.attempts)} steps: the script was ended after {self.seconds:g} s "
                "(--seconds gives it more)"
            )
        if seen.without_gpu:
            lines = ", ".join(seen.without_gpu[:3])
            self.unknown.append(
                f"what half precision does: autocast for cuda, at {lines}, is off where there is no GPU; "
                "the script ran in float32, and with torch.autocast('cpu', torch.float16) it does not"
            )

    def _say_what_was_not_traced(
        self, seen: Seen, origins: Sequence[Origin], findings: Sequence[Finding]
    ) -> str:
        """Returns what broke and has no finding, and why."""
        if find_suspects(seen.attempts) and not any(origin.has_reached for origin in origins):
            step = seen.attempts[seen.suspects[0]].step
            again = "it did not happen again: seed what it draws"
            if self.seen["traced"].is_late:
                again = f"that run was ended after {self.run.seconds:g} s (--seconds gives it more)"
            reason = f"that {self.ended['traced']}" if "traced" in self.ended else again
            return f"Step {step} broke, and could not be traced: {reason}."
        if "watched" not in self.ended or findings:
            return ""
        ended = self.ended.get("traced", self.ended["watched"])  # which knows more
        advice = f"\n  -> {ended.advice}" if ended.advice else ""
        return f"The script broke by itself: {ended}{advice}"

    def _say_how_runs_ended(self, said: str, findings: Sequence[Finding]) -> None:
        """Says which runs ended by an error that nothing else says, the same of several once."""
        errors = [str(finding.facts["error"]) for finding in findings if "error" in finding.facts]
        for name, error in self.ended.items():
            is_said = str(error) in (said, *self.unknown) or any(text in error.text for text in errors)
            if not (is_said or error.text in said or any(line.endswith(error.text) for line in self.unknown)):
                self.unknown.append(f"the {name} {error}")

    def _of_half_alone(self, seen: Seen) -> Finding | None:
        """Returns the finding that the script ends by an error, if it does not in float32."""
        error = self.ended.get("traced", self.ended["watched"])
        if not error.is_raised or "float32" in self.ended:
            return None
        step = seen.attempts[-1].step + 1 if seen.attempts else 0
        name, _, text = error.text.partition(": ")
        facts = {"error": text, "advice": error.advice, "halved": seen.halved}
        return Finding(
            *("", step, "error", None, "", name.rpartition(".")[2], error.where),
            **{"autocast": self.seen["watched"].autocast, "float32_survives": True},
            facts=facts | {"has_scaler": has_scaler(seen.attempts)},
        )

    def _in_float32(self, seen: Seen, hidden: tuple[int, ...], sample: int | None) -> Seen:
        """Runs the script in float32, and traces there what a loss scale may have hidden.

        Where the script may have given up on a bad loss, what it then did is traced as well. A long script
        ends some steps after what broke.
        """
        left_out = tuple(index for index, attempt in enumerate(seen.attempts) if attempt.left_out)
        window = left_out + ((len(seen.attempts),) if seen.is_open else ()) + hidden
        run = replace(self.run, level="O0", float32=True, goes_on=True, sample=sample)
        if self.spent[0] > LONG and seen.suspects:
            self.enough = pick_suspects(seen.attempts, seen.suspects, MOST_TRACED)[-1] + ENOUGH
        run = replace(run, traces=bool(window), window=window, most=self.enough)
        again = self._start("float32", run)
        if again.is_late:
            self.enough = len(again.attempts)
        self.first_in_float32 = again if sample is None else None  # which has weights of another run
        return again

    @property
    def compared(self) -> int:
        """The attempts that are compared with float32 where nothing breaks: all of a short run."""
        is_short = self.spent[0] <= SHORT
        return max(ENOUGH, len(self.seen["watched"].attempts) if is_short else 0)

    def _alone(self) -> Seen:
        """Returns what the first steps of the script are in float32, of one run."""
        if self.first_in_float32 is None:
            self.first_in_float32 = self._start("float32", self._run_in_float32)
        return self.first_in_float32

    @property
    def _run_in_float32(self) -> ScriptRun:
        return replace(self.run, level="O0", float32=True, most=self.compared)

    def _survives(self, seen: Seen, again: Seen) -> bool | None:
        """Says whether the run in float32 stayed finite to its end, or as far as it was made."""
        broken = [attempt for attempt in again.attempts if not attempt.is_finite]
        if not broken and len(again.attempts) < len(seen.attempts[: self.enough]):
            self.unknown.append("in float32 the script ended before its last step")
            return None
        survives = not broken and not any(origin.has_reached for origin in again.origins)
        if again.is_half and not survives:
            self.unknown.append(
                "whether float32 survives: the script makes its model half by itself, as .half() does"
            )
            return None
        return survives

    def can_afford(self) -> bool:
        """Says whether another run costs no more than is allowed, beside those that were made."""
        return sum(self.spent) + self.spent[0] <= MOST_TIMES * self.spent[0] + MOST_SECONDS

    def _start(self, name: str, run: ScriptRun) -> Seen:
        """Runs the script in a process of its own, and returns what it left."""
        self.runs += 1
        if self.tell:
            last = f" (the last took {time.monotonic() - self.begun:.0f} s)" if self.runs > 1 else ""
            self.tell(f"run {self.runs}: {name}, {WHY[name]}{last}")
        before, self.begun = cpu_of_children(), time.monotonic()
        with temporary_folder("doctor") as folder:
            out = folder / "seen"
            status, stderr = self.launch(replace(run, out=str(out)), folder)
            if not out.exists():
                last = stderr.strip()[-500:] or "it said nothing; os._exit and kill do that"
                raise AmpError(f"the {name} run left no report, and ended with status {status}: {last}")
            seen = self.seen[name] = Seen.read(out)
        self.spent.append(cpu_of_children() - before)
        if status and name != "tried":
            self.ended[name] = read_error(status, stderr)
        self.silent += seen.silent if name in ("watched", "traced") else []
        failed = (f"{what} ({FAULT})" for what in seen.failed if name != "tried")
        self.unknown += [line for line in failed if line not in self.unknown]
        return seen


def origins_of(seen: Seen) -> tuple[Origin, ...]:
    """Returns the origins up to the first attempt that left bad weights: all that follows comes of it."""
    bad = (index for index, attempt in enumerate(seen.attempts) if not attempt.weights)
    last = next(bad, len(seen.attempts))
    return tuple(origin for origin in seen.origins if origin.attempt <= last)


def places_before(finding: Finding, changes: Sequence[Change]) -> dict[str, object]:
    """Returns where a finding in changed files stands in those on the disk, and the change of its region."""
    region = finding.region
    if region is not None:
        (change,) = region.changes
        first, last = (line_before(changes, f"{change.path}:{line}") for line in (change.first, change.last))
        there = replace(change, first=place_of(first)[1], last=place_of(last)[1])
        region = replace(region, changes=(there,))
    return {"where": line_before(changes, finding.where), "region": region}


def cpu_of_children() -> float:
    """Returns the CPU seconds of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def order_of(finding: Finding) -> tuple[int, bool]:
    """Returns its step; in a backward pass a quotient comes after the root that it divides by."""
    return finding.step or 0, finding.phase == "backward" and finding.op in QUOTIENTS


def modules_to_keep(findings: Sequence[Finding], oversized: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules that break, and the layers with numbers in float32 that float16 cannot hold.

    What follows a fault is hidden by it: the run in float32 shows it. A module stands for those inside.
    """
    names = [finding.module for finding in findings if finding.phase == "forward"]
    names += oversized if any(finding.dtype == "float16" for finding in findings) else ()
    kept = {
        name for name in names if name and not any(name.startswith(f"{other}.") for other in names if other)
    }
    return tuple(
        sorted(kept, key=lambda name: [(not part.isdigit(), part.zfill(9)) for part in name.split(".")])
    )


def places_of(finding: Finding, findings: Sequence[Finding]) -> tuple[str | None, ...]:
    """Returns the other lines that break by the same constant."""
    constant = finding.facts.get("constant")
    return tuple(
        finding.where for finding in findings if constant and finding.facts.get("constant") == constant
    )


def find_behind(again: Seen, hidden: Sequence[int]) -> list[Origin]:
    """Returns what broke in float32 at attempts whose gradients a loss scale had made too large."""
    origins = () if again.is_half else origins_of(again)
    return [origin for origin in origins if origin.has_reached and origin.attempt in hidden]


def findings_in(seen: Seen, origins: Sequence[Origin], may_collapse: bool = True) -> list[Finding]:
    """Returns what reached a loss, gradient or weight, but for what a dynamic scale mends by itself."""
    reached = [origin for origin in origins if origin.has_reached and origin.attempt in seen.suspects]
    return merge(seen.attempts, leave_out_mended(seen.attempts, reached, may_collapse))
