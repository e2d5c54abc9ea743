"""What a watch found: the attempts at steps, and the findings of those that broke."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.campaign import MOST_TRACED, merge_steps, modules_to_keep
from ampatch.doctor.causes import explain
from ampatch.doctor.finding import Finding, Report, read_finding
from ampatch.doctor.instruments.clock import ScalerInUse
from ampatch.doctor.instruments.operations import Call, Origin
from ampatch.doctor.instruments.values import examine, is_finite
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.record import Record
from ampatch.doctor.live.replay import replay
from ampatch.doctor.suspects import describe_scale, find_suspects, leave_out_mended
from ampatch.doctor.words import describe, describe_finding
from ampatch.levels.stack import asked


@dataclass
class Stretch:
    """Attempts in a row that were alike: finite, at one scale."""

    attempt: Attempt
    count: int = 1


@dataclass
class Replayed:
    """What the replay of one attempt showed; `survives` is None where float32 could not be tried."""

    index: int
    step: int
    origins: list[dict]
    survives: bool | None = None
    oversized: tuple[str, ...] = ()
    grown: float = 1.0


@dataclass
class Patient(ScalerInUse):
    """What is watched. `findings` and `report()` say what broke so far, as `ampatch doctor` does."""

    replays: list[Replayed] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_replaying: bool = False

    def __post_init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._count = 0
        self._good = 0.0  # the largest scale that a step was made with
        self._is_over = False  # weights are bad
        self._is_searching = False  # for a scale that does not overflow
        self._logged: set[object] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What broke, in the order of appearance, with reasons and remedies."""
        return self._found()

    def _found(self, may_collapse: bool = True) -> tuple[Finding, ...]:
        attempts = list(self._attempts())
        suspects = set(find_suspects(attempts))
        found = [it for it in self._origins() if it["has_reached"] and it["attempt"] in suspects]
        return self._merged(leave_out_mended(attempts, found, may_collapse))

    @property
    def harmless(self) -> tuple[Finding, ...]:
        """What broke in a step that was replayed, and reached nothing."""
        return self._merged([it for it in self._origins() if not it["has_reached"]])

    def report(self) -> Report:
        """Returns what was found as `ampatch doctor` reports it; `runs` counts the replays."""
        return Report(
            self.findings,
            self.harmless,
            describe_scale(list(self._attempts())),
            (),
            len(self.replays),
            tuple(dict.fromkeys(self.unknown)),
        )

    def __str__(self) -> str:
        return "\n".join(describe(self.report()))

    # ---- What the watcher tells ----

    def add(self, attempt: Attempt) -> bool:
        """Notes an attempt; says whether it should be replayed: of a scale's search only the first is."""
        last = self._stretches[-1] if self._stretches else None
        like = last is not None and last.attempt.is_finite and attempt.is_finite
        if like and (last.attempt.scale, last.attempt.is_dynamic) == (attempt.scale, attempt.is_dynamic):
            last.count += 1
        else:
            self._stretches.append(Stretch(attempt))
        self._count += 1
        if attempt.is_finite:
            self._good, self._is_searching = max(self._good, attempt.scale or 0.0), False
            return False
        is_probe = attempt.is_dynamic and attempt.loss and (attempt.scale or 0.0) > self._good
        goes_on, self._is_searching = is_probe and self._is_searching, is_probe
        return not (goes_on or self._is_over) and len(self.replays) < MOST_TRACED

    def _blame_weights(self) -> None:
        """Notes that the step before the latest left bad weights: all that follows comes of it."""
        self._is_over = True
        if len(self._stretches) < 2:
            return
        run = self._stretches[-2]
        kept = [] if run.count == 1 else [Stretch(run.attempt, run.count - 1)]
        self._stretches[-2:-1] = [*kept, Stretch(replace(run.attempt, weights=False))]

    def examine(
        self,
        record: Record,
        number: int,
        models: Sequence[Module],
        optimizers: Sequence[Optimizer],
        optimizer: Optimizer | None,
    ) -> None:
        """Replays the latest attempt, and logs what is found."""
        scale = self._stretches[-1].attempt.scale or 1.0
        origins, survives, unknown, oversized = replay(record, models, optimizers, optimizer, scale)
        self.unknown += [f"step {number}: {line}" for line in unknown]
        of_weights = [it for it in origins if it["phase"] == "optimizer" and not it["call"]["op"]]
        grown = max((state.times_grown() for state in record.state.values()), default=1.0)
        before = self._stretches[-2].attempt if len(self._stretches) > 1 else None
        if of_weights:
            self._blame_weights()
        if of_weights and before is None:  # no step has made them
            origins = [it | {"phase": "input"} if it in of_weights else it for it in origins]
        elif of_weights:
            origins = [it for it in origins if it not in of_weights]
            if before.is_finite:
                note_eps(of_weights, optimizer)
                made = Replayed(self.latest - 1, max(number - 1, 0), of_weights, survives, (), grown)
                self.replays.append(made)
        self.replays.append(Replayed(self.latest, number, origins, survives, oversized, grown))
        self._tell(is_end=not self._stretches[-1].attempt.is_dynamic)  # a static scale searches for nothing

    def _look_at_weights(self, models: Sequence[Module]) -> None:
        last = self._stretches[-1] if self._stretches else None
        if last is None or not last.attempt.is_finite:
            return
        named = [pair for model in models for pair in model.named_parameters()]
        name, bad = next(((n, p) for n, p in named if not is_finite(p)), (None, None))
        if bad is None:
            return
        call = Call("", "optimizer", None, None)
        origin = Origin(call, "optimizer", examine(bad), 0, parameter=name, has_reached=True)
        self._stretches.append(Stretch(last.attempt))
        self._blame_weights()
        self._stretches.pop()
        self.replays.append(Replayed(self.latest, last.attempt.step + last.count - 1, [origin.to_json()]))
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
        return self._count - 1

    def _attempts(self) -> Iterator[Attempt]:
        for run in self._stretches:
            for _ in range(run.count):
                yield run.attempt

    def _origins(self) -> list[dict]:
        return [it | {"attempt": one.index} for one in self.replays for it in one.origins]

    def _merged(self, origins: Sequence[dict]) -> tuple[Finding, ...]:
        of = {one.index: one for one in self.replays}
        attempts = list(self._attempts())
        found = []
        for origin in origins:
            one = of[origin["attempt"]]
            it = read_finding(origin, one.step, attempts[one.index])
            found.append(replace(it, float32_survives=one.survives, facts=it.facts | {"grown": one.grown}))
        keep = modules_to_keep(found, [name for one in self.replays for name in one.oversized])
        return tuple(explain(replace(it, keep=keep)) for it in merge_steps(found))


def note_eps(origins: Sequence[dict], optimizer: Optimizer | None) -> None:
    """Notes an eps of the optimizer that is 0 in the type of the weights that it made."""
    for group in optimizer.param_groups if optimizer is not None else ():
        eps, dtype = group.get("eps"), group["params"][0].dtype
        if eps and torch.tensor(eps, dtype=dtype) == 0:
            for it in origins:
                it["call"]["facts"] = {"constant": (eps, "0", str(dtype)[6:])}
