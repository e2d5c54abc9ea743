"""A silent fault: all numbers stay finite, no step is skipped, and the training is wrong nevertheless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Site
from ampatch.doctor.instruments.places import Place


@dataclass(frozen=True, slots=True)
class SilentFault:
    """One silent fault, of a kind that `words.WORDS` explains.

    `numbers` are what was measured, by name; `steps` are those at which it was seen.
    """

    kind: str
    step: int | None
    phase: str
    model: str | None
    module: str
    parameter: str | None
    op: str
    where: str | None
    numbers: dict[str, object] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    why: str = ""
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is a fault if what follows makes it one."""

    kind: str
    site: Site
    numbers: dict[str, object] = field(default_factory=dict)


class Notes:
    """What was found in one run: each fault once, with the attempts at which it was seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[tuple[object, ...], tuple[SilentFault, list[int]]] = {}

    def add(
        self,
        kind: str,
        phase: str,
        where: str | None,
        op: str,
        place: Place | None = None,
        attempt: int | None = None,
        **numbers: object,
    ) -> None:
        """Notes a fault, at the present attempt unless another is given."""
        attempt = self._clock.attempt if attempt is None else attempt
        key = (kind, where, op, place and place.module)
        if key not in self._found:
            model, module = (None, "") if place is None else (place.model, place.module)
            fault = SilentFault(kind, attempt, phase, model, module, None, op, where, numbers)
            self._found[key] = fault, []
        attempts = self._found[key][1]
        if attempt not in attempts:
            attempts.append(attempt)

    def confirm(self, suspicion: Suspicion, **numbers: object) -> None:
        """Notes what is a fault by now."""
        self.add(suspicion.kind, *suspicion.site, **suspicion.numbers, **numbers)

    def found(self) -> list[SilentFault]:
        """Returns the faults; their steps are attempts as yet."""
        return [replace(fault, steps=tuple(attempts)) for fault, attempts in self._found.values()]


def merge_faults(found: Sequence[SilentFault], steps: Mapping[int, int]) -> list[SilentFault]:
    """Returns what several runs found, the same once; `steps` has the step of each attempt."""
    merged: dict[tuple[object, ...], SilentFault] = {}
    for one in found:
        key = (one.kind, one.where, one.op, one.module, one.parameter)
        before = merged[key].steps if key in merged else ()
        all_steps = tuple(sorted({*before, *(steps.get(attempt, attempt) for attempt in one.steps)}))
        merged[key] = replace(one, step=min(all_steps, default=None), steps=all_steps)
    return sorted(merged.values(), key=lambda it: -1 if it.step is None else it.step)
