"""The runs of a script that make a report: one that is watched, one that is traced, one in float32."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ampatch import AmpError
from ampatch.doctor.errors import describe_error
from ampatch.doctor.finding import Finding, Report, merge
from ampatch.doctor.instruments.tape import QUOTIENTS, Origin
from ampatch.doctor.rules.table import explain
from ampatch.doctor.run import Run
from ampatch.doctor.runs import Launch, Seen, start_process
from ampatch.doctor.silent.gradients import compare_gradients, pick_sample
from ampatch.doctor.silent.notes import examine_silent
from ampatch.doctor.suspects import (
    describe_scale,
    fall_of,
    find_hidden,
    find_suspects,
    has_scaler,
    is_flat,
    leave_out_mended,
    plan_looks,
    plan_window,
)
from ampatch.doctor.text.source import Change, line_before, place_of
from ampatch.doctor.trial.learning import can_try, find_what_learns
from ampatch.doctor.trial.trial import ENOUGH, Trial
from ampatch.tools.folder import temporary_folder

MOST_TRACED = 8  # attempts of one run
# CPU of all runs: times that of the watched one, which is about 1.6 times the script's own, and seconds.
MOST_TIMES, MOST_SECONDS = 6.0, 20.0
LONG = 300.0  # CPU seconds of the watched run
LESS = 0.1  # of the loss: it falls so much less than in float32
ALWAYS_TRACED = 2  # first attempts, where nothing is wrong: for what is harmless


@dataclass
class Campaign:
    """Runs a script as often as it takes; `runs` counts, `unknown` says what could not be known."""

    run: Run
    launch: Launch = start_process
    tries: bool = False  # whether advice is tried
    tell: Callable[[str], None] | None = None  # hears of each run
    runs: int = 0
    unknown: list[str] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)  # of the last run of a name
    ended: dict[str, str] = field(default_factory=dict)  # how runs ended that raised, by name
    first_in_float32: Seen | None = None
    enough: int | None = None  # attempts in float32, of a long script
    spent: list[float] = field(default_factory=list)  # CPU seconds of each run
    silent: list[Finding] = field(default_factory=list)  # of the watched and the traced run

    def report(self) -> Report:
        """Watches the script, traces what broke, asks whether float32 survives, and tries what helps."""
        with temporary_folder("doctor") as folder:
            self.run = replace(self.run, samples=str(folder))
            return self._report()

    def _report(self) -> Report:
        seen = self._start("watched", replace(self.run, grows=True))
        self._say_what_was_not_watched(seen)
        attempts = seen.attempts
        sample = pick_sample(seen.shares, attempts)
        window = seen.suspects[:MOST_TRACED] or range(min(ALWAYS_TRACED, len(attempts)))
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
        if findings:
            findings = self._explain(findings, seen, again)
        elif sample is not None:
            faults, reason = compare_gradients(self.run.samples, sample)
            more = {"autocast": self.seen["traced"].autocast, "float32_survives": True, "dtype": "float16"}
            self.silent += [replace(it, **more) for it in faults]
            self.unknown += [reason] if reason else []
        harmless = merge(attempts, [it for it in origins if not it.has_reached])
        silent, learnt = self._examine_silent(seen, findings, harmless)
        findings = findings or learnt
        return Report(
            *(tuple(findings), tuple(map(explain, harmless)), describe_scale(attempts), self.runs),
            tuple(self.unknown),
            silent=silent,
            untraced=self._say_what_was_not_traced(seen, origins, findings),
        )

    def _examine_silent(
        self, seen: Seen, findings: Sequence[Finding], harmless: Sequence[Finding]
    ) -> tuple[tuple[Finding, ...], list[Finding]]:
        """Returns the silent faults, or else what would have the script learn, if it does not."""
        attempts = seen.attempts
        own = {"halved": seen.halved, "has_scaler": has_scaler(attempts)}
        faults = [replace(it, facts=own | it.facts) for it in self.silent]
        is_whole = not (findings or self.ended)

        def learns_less() -> bool:
            best = fall_of(self._alone().attempts[:ENOUGH]) if is_whole else 0.0
            return is_whole and best >= fall_of(attempts[:ENOUGH]) + LESS

        silent = tuple(examine_silent(faults, attempts, findings, bool(self.ended), learns_less))
        tryable = next((it for it in silent if can_try(it, self.run)), None)
        is_due = tryable is not None if silent else is_flat(attempts)
        if not (self.tries and attempts and is_due and is_whole):
            return silent, []
        trial = Trial(self._start, lambda *_: (), self.run, seen, self._alone(), self.can_afford)
        silent = tuple(trial.order(it) if it is tryable else it for it in silent)
        half, autocast = str(seen.growth["half"]), self.seen["traced"].autocast
        return silent, [] if silent else find_what_learns(trial, harmless, half, autocast)

    def _explain(self, findings: Sequence[Finding], seen: Seen, again: Seen) -> list[Finding]:
        """Returns findings with their causes and what to do, which is tried for the first."""
        survives = self._survives(seen, again)
        is_of_half = survives and "traced" in self.ended and "float32" not in self.ended

        def explained(found: Sequence[Finding]) -> list[Finding]:
            keep = modules_to_keep(found, again.oversized) if survives else ()
            own = {"halved": seen.halved, "has_scaler": has_scaler(seen.attempts)}
            facts = seen.growth | own
            facts |= {"up_to": again.attempts[-1].step} if survives and self.enough else {}
            more = {"float32_survives": survives, "keep": keep}
            return [
                explain(replace(it, **more, facts=it.facts | facts | {"places": places_of(it, found)}))
                for it in found
                if is_of_half or "error" not in it.facts
            ]

        def broken(tried: Seen, run: Run) -> list[Finding]:
            there = findings_in(tried, origins_of(tried))
            return explained([replace(it, **places_before(it, run.changes)) for it in there])

        found = explained(findings)
        if found and self.tries:
            found[0] = Trial(self._start, broken, self.run, seen, again, self.can_afford).order(found[0])
        return found

    def _say_what_was_not_watched(self, seen: Seen) -> None:
        if not seen.attempts and not seen.is_open:
            self.unknown.append(
                "the script made no step of an optimizer, in its own process: nothing was watched"
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
        if find_suspects(seen.attempts) and not any(it.has_reached for it in origins):
            step = seen.attempts[seen.suspects[0]].step
            again = "it did not happen again: seed what it draws"
            reason = self.ended.get("traced", again).replace("run ended", "that run ended")
            return f"Step {step} broke, and could not be traced: {reason}."
        is_unknown = "watched" in self.ended and not findings
        ended = self.ended.get("traced", self.ended.get("watched"))  # which knows more
        return f"The script broke by itself: {ended}" if is_unknown else ""

    def _in_float32(self, seen: Seen, hidden: tuple[int, ...], sample: int | None) -> Seen:
        """Runs the script in float32, and traces there what a loss scale may have hidden.

        Where the script may have given up on a bad loss, what it then did is traced as well. A long script
        ends some steps after what broke.
        """
        left_out = tuple(index for index, it in enumerate(seen.attempts) if it.left_out)
        window = left_out + ((len(seen.attempts),) if seen.is_open else ()) + hidden
        run = replace(self.run, level="O0", float32=True, goes_on=True, sample=sample)
        if self.spent[0] > LONG and seen.suspects:
            self.enough = seen.suspects[:MOST_TRACED][-1] + ENOUGH
        run = replace(run, traces=bool(window), window=window, most=self.enough)
        again = self._start("float32", run)
        self.first_in_float32 = again if sample is None else None  # which has weights of another run
        return again

    def _alone(self) -> Seen:
        """Returns what the first steps of the script are in float32, of one run."""
        run = replace(self.run, level="O0", float32=True, most=ENOUGH)
        if self.first_in_float32 is None:
            self.first_in_float32 = self._start("float32", run)
        return self.first_in_float32

    def _survives(self, seen: Seen, again: Seen) -> bool | None:
        """Says whether the run in float32 stayed finite to its end, or as far as it was made."""
        broken = [attempt for attempt in again.attempts if not attempt.is_finite]
        if not broken and len(again.attempts) < len(seen.attempts[: self.enough]):
            self.unknown.append("in float32 the script ended before its last step")
            return None
        survives = not broken and not any(it.has_reached for it in again.origins)
        if again.is_half and not survives:
            self.unknown.append(
                "whether float32 survives: the script makes its model half by itself, as .half() does"
            )
            return None
        return survives

    def can_afford(self) -> bool:
        """Says whether another run costs no more than is allowed, beside those that were made."""
        return sum(self.spent) + max(self.spent) <= MOST_TIMES * self.spent[0] + MOST_SECONDS

    def _start(self, name: str, run: Run) -> Seen:
        """Runs the script in a process of its own, and returns what it left."""
        self.runs += 1
        if self.tell:
            self.tell(f"run {self.runs}: {name}")
        before = cpu_of_children()
        with temporary_folder("doctor") as folder:
            out = folder / "seen"
            status, said = self.launch(replace(run, out=str(out)), folder)
            if not out.exists():
                last = said.strip()[-500:] or "it said nothing; os._exit and kill do that"
                raise AmpError(f"the {name} run left no report, and ended with status {status}: {last}")
            seen = self.seen[name] = Seen.read(out)
        self.spent.append(cpu_of_children() - before)
        if status and name != "tried":
            ended = self.ended[name] = f"run ended with status {status}: {describe_error(said)}"
            error = ended.split("\n")[0]
            if not any(it.endswith(error) for it in self.unknown):  # the same of each run, once
                self.unknown.append(f"the {name} {error}")
        self.silent += seen.silent if name in ("watched", "traced") else []
        return seen


def origins_of(seen: Seen) -> tuple[Origin, ...]:
    """Returns the origins up to the first attempt that left bad weights: all that follows comes of it."""
    bad = (index for index, attempt in enumerate(seen.attempts) if not attempt.weights)
    last = next(bad, len(seen.attempts))
    return tuple(it for it in seen.origins if it.attempt <= last)


def places_before(finding: Finding, changes: Sequence[Change]) -> dict[str, object]:
    """Returns where a finding in changed files stands in those on the disk, and the change of its region."""
    region = finding.region
    if region is not None:
        (change,) = region.changes
        first, last = (line_before(changes, f"{change.path}:{it}") for it in (change.first, change.last))
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
    names = [it.module for it in findings if it.phase == "forward"]
    names += oversized if any(it.dtype == "float16" for it in findings) else ()
    found = {it for it in names if it and not any(it.startswith(f"{other}.") for other in names if other)}
    return tuple(
        sorted(found, key=lambda it: [(not part.isdigit(), part.zfill(9)) for part in it.split(".")])
    )


def places_of(finding: Finding, findings: Sequence[Finding]) -> tuple[str | None, ...]:
    """Returns the other lines that break by the same constant."""
    constant = finding.facts.get("constant")
    return tuple(it.where for it in findings if constant and it.facts.get("constant") == constant)


def find_behind(again: Seen, hidden: Sequence[int]) -> list[Origin]:
    """Returns what broke in float32 at attempts whose gradients a loss scale had made too large."""
    found = () if again.is_half else origins_of(again)
    return [it for it in found if it.has_reached and it.attempt in hidden]


def findings_in(seen: Seen, origins: Sequence[Origin], may_collapse: bool = True) -> list[Finding]:
    """Returns what reached a loss, gradient or weight, but for what a dynamic scale mends by itself."""
    found = [it for it in origins if it.has_reached and it.attempt in seen.suspects]
    return merge(seen.attempts, leave_out_mended(seen.attempts, found, may_collapse))
