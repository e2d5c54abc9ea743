"""What a watch found: the attempts at steps, and the findings of those that broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.campaign import MOST_TRACED, findings_in, modules_to_keep
from ampatch.doctor.finding import Finding, Report, merge
from ampatch.doctor.instruments.clock import ScalerInUse
from ampatch.doctor.instruments.operations import Origin
from ampatch.doctor.instruments.tape import Op
from ampatch.doctor.instruments.values import examine, is_finite
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.outcome import Step
from ampatch.doctor.live.replay import replay
from ampatch.doctor.rules.table import explain
from ampatch.doctor.runs import Seen
from ampatch.doctor.suspects import describe_scale
from ampatch.doctor.words import describe, describe_finding
from ampatch.levels.stack import asked
from ampatch.patching.torch_patch import call_before_step


@dataclass
class Patient(ScalerInUse):
    """What is watched. `findings` and `report()` say what broke so far, as `ampatch doctor` does."""

    attempts: list[Attempt] = field(default_factory=list)  # those alike in a row are one object
    origins: list[Origin] = field(default_factory=list)
    oversized: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    replays: int = 0
    is_replaying: bool = False

    def __post_init__(self) -> None:
        self._good = 0.0  # the largest scale that a step was made with
        self._is_over = False  # weights are bad
        self._is_searching = False  # for a scale that does not overflow
        self._logged: set[object] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What broke, in the order of appearance, with reasons and remedies."""
        return self._found()

    def _found(self, may_collapse: bool = True) -> tuple[Finding, ...]:
        seen = Seen(tuple(self.attempts), False, False, tuple(self.origins))
        return self._explained(findings_in(seen, seen.origins, may_collapse))

    def _explained(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        keep = modules_to_keep(found, self.oversized)
        return tuple(explain(replace(it, keep=keep)) for it in found)

    @property
    def harmless(self) -> tuple[Finding, ...]:
        """What broke in a step that was replayed, and reached nothing."""
        return self._explained(merge(self.attempts, [it for it in self.origins if not it.has_reached]))

    def report(self) -> Report:
        """Returns what was found as `ampatch doctor` reports it; `runs` counts the replays."""
        scale, unknown = describe_scale(self.attempts), tuple(dict.fromkeys(self.unknown))
        return Report(self.findings, self.harmless, scale, self.replays, unknown)

    def __str__(self) -> str:
        return "\n".join(describe(self.report()))

    # ---- What the watcher tells ----

    def add(self, attempt: Attempt) -> bool:
        """Notes an attempt; says whether it should be replayed: of a scale's search only the first is."""
        last = self.attempts[-1] if self.attempts else attempt
        is_alike = (last.scale, last.is_dynamic) == (attempt.scale, attempt.is_dynamic)
        self.attempts.append(last if last.is_finite and attempt.is_finite and is_alike else attempt)
        if attempt.is_finite:
            self._good, self._is_searching = max(self._good, attempt.scale or 0.0), False
            return False
        is_probe = attempt.is_dynamic and attempt.loss and (attempt.scale or 0.0) > self._good
        goes_on, self._is_searching = is_probe and self._is_searching, is_probe
        return not (goes_on or self._is_over) and self.replays < MOST_TRACED

    def _blame_weights(self, index: int, step: int) -> None:
        """Notes that a step left bad weights: all that follows comes of it."""
        self._is_over, known = True, self.attempts[index]
        # One that was finite may be an object that stands for others, too.
        self.attempts[index] = replace(known, weights=False, step=step if known.is_finite else known.step)

    def _note(
        self, index: int, origins: Sequence[Origin], survives: bool | None = None, grown: float = 1.0
    ) -> None:
        for it in origins:
            it.call.facts["grown"] = grown
            it.attempt, it.float32_survives = index, survives
        self.origins += origins

    def examine(self, step: Step, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        """Replays the latest attempt, and logs what is found."""
        scale = self.attempts[-1].scale or 1.0
        origins, survives, unknown, oversized = call_before_step(replay, step, models, optimizers, scale)
        self.replays += 1
        self.oversized += oversized
        self.unknown += [f"step {step.number}: {line}" for line in unknown]
        of_weights = [it for it in origins if it.phase == "optimizer" and not it.call.op]
        grown = max((state.times_grown() for state in step.record.state.values()), default=1.0)
        self._is_over |= bool(of_weights)
        if of_weights and not self.latest:  # no step has made them
            for it in of_weights:
                it.phase = "input"
        elif of_weights:
            origins = [it for it in origins if it not in of_weights]
            if self.attempts[-2].is_finite:
                note_eps(of_weights, step.optimizer())
                self._note(self.latest - 1, of_weights, survives, grown)
            self._blame_weights(self.latest - 1, step.number - 1)
        self._note(self.latest, origins, survives, grown)
        self._tell(is_end=not self.attempts[-1].is_dynamic)  # a static scale searches for nothing

    def _look_at_weights(self, models: Sequence[Module]) -> None:
        if not self.attempts or not self.attempts[-1].is_finite:
            return
        named = [pair for model in models for pair in model.named_parameters()]
        name, bad = next(((n, p) for n, p in named if not is_finite(p)), (None, None))
        if bad is None:
            return
        call = Op("", "optimizer", None, None)
        origin = Origin(call, "optimizer", examine(bad), 0, parameter=name, has_reached=True)
        last = self.attempts[-1]
        self._blame_weights(self.latest, last.step + sum(it is last for it in self.attempts) - 1)
        self._note(self.latest, [origin])
        self.unknown.append("the last step left bad weights: which operation of the optimizer made them")

    def finish(self, models: Sequence[Module]) -> None:
        """Says at the end whether the last step left bad weights, which costs a host sync."""
        self._look_at_weights(models)
        self._tell(is_end=True)

    def _tell(self, is_end: bool = False) -> None:
        """Logs findings that are new; of a scale that no step was made with more may be too large."""
        for it in self._found(is_end or self._good > 0):
            if it.identity not in self._logged:
                self._logged.add(it.identity)
                asked.warning("%s", "\n".join(describe_finding(it)))

    @property
    def latest(self) -> int:
        """The index of the latest attempt."""
        return len(self.attempts) - 1


def note_eps(origins: Sequence[Origin], optimizer: Optimizer | None) -> None:
    """Notes an eps of the optimizer that is 0 in the type of the weights that it made."""
    for group in optimizer.param_groups if optimizer is not None else ():
        eps, dtype = group.get("eps"), group["params"][0].dtype
        if eps and torch.tensor(eps, dtype=dtype) == 0:
            for it in origins:
                it.call.facts = {"constant": (eps, "0", str(dtype)[6:])}
