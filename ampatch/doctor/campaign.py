"""The runs of a script that make a report: one that is watched, one that is traced, one in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampatch import AmpError
from ampatch.doctor.child import Run
from ampatch.doctor.finding import Finding, Report, read_finding
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.examine import compare_gradients, examine_silent, pick_sample, plan_window

MOST_TRACED = 6  # attempts of one run
MOST_OVERFLOWS = 2  # at a scale that was good before
ALWAYS_TRACED = 2  # first attempts, where nothing is wrong: for what is harmless


@dataclass
class Campaign:
    """Runs a script as often as it takes; `runs` counts, `unknown` says what could not be known."""

    run: Run
    runs: int = 0
    unknown: list[str] = field(default_factory=list)
    silent: list[dict] = field(default_factory=list)  # what the watched and the traced run left

    def report(self, propose: bool = False) -> Report:
        """Runs the script as often as it takes; see `_report`."""
        with tempfile.TemporaryDirectory(prefix="ampatch-doctor-") as folder:
            self.run = replace(self.run, samples=folder)
            return self._report(propose)

    def _report(self, propose: bool) -> Report:
        """Watches, traces what broke, asks whether float32 survives, and proposes what to keep in it."""
        attempts, _ = self._start("watched", self.run)
        if not attempts:
            self.unknown.append("the script made no step of an optimizer: nothing was watched")
        suspects = find_suspects(attempts)
        window = suspects[:MOST_TRACED] or tuple(range(min(ALWAYS_TRACED, len(attempts))))
        sample = pick_sample(self.silent, attempts)
        window = tuple(sorted({*window, *plan_window(attempts, sample)}))
        traced = replace(self.run, traces=True, window=window, sample=sample)
        origins = self._start("traced", traced)[1] if window else []
        if suspects and not any(it["has_reached"] for it in origins):
            self.unknown.append("it did not happen again when the script was repeated: seed what it draws")
        findings = findings_in(attempts, origins)
        survives = self._survives(len(attempts)) if findings else None
        findings = [replace(finding, float32_survives=survives) for finding in findings]
        keep = self._propose(findings[0].module) if propose and survives and findings[0].module else ()
        harmless = merge(attempts, [it for it in origins if not it["has_reached"]])
        if sample is not None:
            self._start("compared", replace(self.run, level="O0", float32=True, sample=sample))
            self.silent.append(compare_gradients(self.run.samples, sample, self.unknown))
        silent = examine_silent(self.silent, attempts, findings)
        return Report(
            *(tuple(findings), tuple(harmless), describe_scale(attempts), keep, self.runs),
            *(tuple(self.unknown), silent),
        )

    def _survives(self, steps: int) -> bool | None:
        """Runs the script in float32 and says whether it stays finite to its end."""
        attempts, _ = self._start("float32", replace(self.run, level="O0", float32=True))
        broken = [attempt for attempt in attempts if not attempt.is_finite]
        if not broken and len(attempts) < steps:
            self.unknown.append("in float32 the script ended before its last step")
            return None
        return not broken

    def _propose(self, first: str) -> tuple[str, ...]:
        """Follows the first faulty module, keeps it, and runs again; then takes each back.

        Costs a run for each module, and as many for the proof that none is too many.
        """
        keep = (first,)
        while (found := self._first_module(keep)) is not None:
            if found in keep or not found:
                self.unknown.append(
                    f"no proposal: with {list(keep)} in float32 {found or 'the model itself'} breaks"
                )
                return ()
            keep = (*keep, found)
        for name in keep if len(keep) > 1 else ():
            fewer = tuple(other for other in keep if other != name)
            if self._first_module(fewer) is None:
                keep = fewer
        return keep

    def _first_module(self, keep: tuple[str, ...]) -> str | None:
        """Runs with modules in float32; returns the first that breaks nevertheless, None if none."""
        attempts, origins = self._start("proposed", replace(self.run, traces=True, keep_fp32=keep))
        found = findings_in(attempts, origins)
        return found[0].module if found else None

    def _start(self, name: str, run: Run) -> tuple[list[Attempt], list[dict]]:
        """Runs the script in a process of its own, and returns the attempts and origins seen."""
        self.runs += 1
        with tempfile.TemporaryDirectory(prefix="ampatch-doctor-") as folder:
            out = Path(folder, "seen.json")
            done = subprocess.run(
                [sys.executable, "-m", "ampatch.doctor.child", replace(run, out=str(out)).to_json()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
            if not out.exists():
                raise AmpError(f"the {name} run ended before it began: {done.stderr.strip()[-500:]}")
            seen = json.loads(out.read_text())
        if done.returncode:
            last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            self.unknown.append(f"the {name} run ended with status {done.returncode}: {last}")
        self.silent += [seen["silent"]] if name in ("watched", "traced") else []
        return [Attempt(**each) for each in seen["attempts"]], seen["origins"]


def findings_in(attempts: Sequence[Attempt], origins: Sequence[dict]) -> list[Finding]:
    """Returns what reached a loss, gradient or weight, but for what a dynamic scale mends by itself."""
    suspects, collapses = find_suspects(attempts), is_collapse(attempts)
    found = [it for it in origins if it["has_reached"] and it["attempt"] in suspects]
    return merge(attempts, [it for it in found if collapses or not it["is_of_scale"]])


def find_suspects(attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Returns the attempts at which something broke, but for most of those of a dynamic scale's search.

    A scale that is too large at first, or has just grown to where it never was, overflows and falls. The
    first attempt of each such search is looked at: what breaks there may not be the scale's. The first
    attempt that leaves bad weights is the last: all that follows comes of it.
    """
    good = 0.0  # the largest scale that a step was made with
    found, search, firsts = [], [], []
    for index, attempt in enumerate(attempts):
        if attempt.is_finite:
            good, firsts, search = max(good, attempt.scale or 0.0), firsts + search[:1], []
            continue
        is_probe = attempt.is_dynamic and attempt.loss and attempt.weights and (attempt.scale or 0) > good
        (search if is_probe else found).append(index)
        if not attempt.weights:
            break
    # A search that never ended found nothing: no scale is small enough.
    return tuple(sorted({*found, *firsts, *search[:1], *search[-1:]}))


def is_collapse(attempts: Sequence[Attempt]) -> bool:
    """Says whether a scale that may move overflowed more often than its search explains.

    That is more than twice at a scale that a step had been made with, or at every step up to the end.
    """
    good, again = 0.0, 0
    for attempt in attempts:
        if not attempt.is_dynamic:
            return True
        if attempt.is_finite:
            good = attempt.scale or 0.0
        elif (attempt.scale or 0.0) <= good:
            again += 1
    return again > MOST_OVERFLOWS or (good == 0 and not all(attempt.is_finite for attempt in attempts))


def merge(attempts: Sequence[Attempt], origins: Sequence[dict]) -> list[Finding]:
    """Reads origins, and keeps the first of those that are the same at several steps, with their steps."""
    steps = {index: attempt.step for index, attempt in enumerate(attempts)}  # not of one that never ended
    return merge_steps([read_finding(origin, steps.get(origin["attempt"])) for origin in origins])


def merge_steps(findings: Sequence[Finding]) -> list[Finding]:
    """Keeps the first of findings that are the same at several steps, with their steps."""
    merged: dict[tuple[object, ...], Finding] = {}
    for it in findings:
        key = (it.phase, it.op, it.model, it.module, it.call, it.where, it.parameter)
        first = merged.setdefault(key, it)
        if it.step is not None and it.step not in first.steps:
            merged[key] = replace(first, steps=(*first.steps, it.step))
    return list(merged.values())


def describe_scale(attempts: Sequence[Attempt]) -> dict[str, object]:
    """Returns the history of the scale: [step, scale] where it changed, and the steps that were skipped."""
    history: list[tuple[int, float]] = []
    for index, attempt in enumerate(attempts):
        if attempt.scale is not None and (not history or history[-1][1] != attempt.scale):
            history.append((index, attempt.scale))
    skipped = [index for index, it in enumerate(attempts) if it.is_dynamic and not (it.loss and it.gradients)]
    search = bool(skipped) and skipped == list(range(len(skipped))) and len(skipped) < len(attempts)
    return {"history": history, "skipped": skipped, "search": search}
