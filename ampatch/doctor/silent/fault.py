"""A silent fault: all numbers stay finite, no step is skipped, and the training is wrong nevertheless."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Site
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.words import WORDS, words_of
from ampatch.doctor.suspects import is_flat
from ampatch.doctor.text.source import pasted

MOST_SHOWN = 5
STUCK = 0.97  # of what is updated stays as it was: a fault in any case
# Kinds, by what else tells of them.
EXPLAINED = {
    "scaled_not_backpropagated": "late_backward",
    "not_unscaled": "never_stepped",
    "coarse_angles": "collapsed",
}
# Numbers break of these.
MISUSES = ("not_unscaled", "ignored_edits", "unscaled_twice", "never_stepped", "lost_state", "scaled_penalty")
MISUSES += ("not_zeroed", "stepped_twice")
# What the library warns of, by its names of misuse: the fault and the operation.
WARNED = {
    "clipping": ("clipped_while_scaled", "clip_grad"),
    "inside": ("unscaled_backward", "backward"),
    "outside": ("unscaled_backward", "backward"),
    "late": ("late_backward", "backward"),
    "GradScaler": ("two_scalers", "step"),
    "ignored": ("ignored_edits", "step"),
    "halved": ("half_after_initialize", "half"),
    "stranger": ("unknown_optimizer", "step"),
}
COLON = re.compile(r": (?=(?:[^`]*`[^`]*`)*[^`]*$)")  # that is in no code


@dataclass(frozen=True, slots=True)
class SilentFault:
    """One silent fault, of a kind that `WORDS` explains.

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

    def add(self, kind: str, site: Site, attempt: int | None = None, **numbers: object) -> None:
        """Notes a fault, at the present attempt unless another is given."""
        attempt = self._clock.attempt if attempt is None else attempt
        phase, where, op, place = site
        model, module = (None, "") if place is None else (place.model, place.module)
        fault = SilentFault(kind, attempt, phase, model, module, None, op, where, numbers)
        attempts = self._found.setdefault((kind, where, op, module), (fault, []))[1]
        if attempt not in attempts:
            attempts.append(attempt)

    def confirm(self, suspicion: Suspicion, **numbers: object) -> None:
        """Notes what is a fault by now."""
        self.add(suspicion.kind, suspicion.site, **suspicion.numbers, **numbers)

    def found(self) -> tuple[SilentFault, ...]:
        """Returns the faults; their steps are attempts as yet."""
        return tuple(replace(fault, steps=tuple(attempts)) for fault, attempts in self._found.values())


# ---- In words ----


def explain(fault: SilentFault) -> SilentFault:
    """Returns the fault with its reason, and what to change, the likeliest first."""
    if "said" in fault.numbers:  # by the library: what is wrong, and after the colon what to do
        *why, advice = COLON.split(str(fault.numbers["said"]))
        return replace(fault, why=": ".join(why) + ".", remedies=(advice,))
    of_gradient = "gradient" if "init_scale" in fault.numbers else fault.kind
    of_step = "lost_steps" if (fault.kind, fault.op) == ("lost_updates", "step") else of_gradient
    why, *remedies = WORDS["scale_loss" if fault.op == "scale_loss" else of_step]
    if fault.kind == "not_unscaled" and fault.op == "step":
        remedies.reverse()
    if region := fault.numbers.get("region"):
        remedies[0] = pasted(region)
    for name, text in words_of(fault.numbers).items() if of_step == "gradient" else ():
        remedies = [it.replace(name, text) for it in remedies]
    return replace(fault, why=why.format(op=fault.op, **fault.numbers), remedies=tuple(remedies))


def describe_silent(
    faults: Sequence[SilentFault], title: str = "Silent faults, which skip no step"
) -> Iterator[str]:
    """Yields the lines of a terminal; parameters of one kind and line stand together."""
    groups: dict[tuple[str, str, str | None], list[SilentFault]] = {}
    for fault in faults:
        groups.setdefault((fault.phase, fault.kind, fault.where), []).append(fault)
    if groups:
        yield f"{title}: {len(groups)}"
    for first, *others in list(groups.values())[:MOST_SHOWN]:
        module = f" in {first.model}.{first.module}".rstrip(".") if first.model else ""
        subject = first.parameter or first.op
        yield f"Step {first.step}, {first.kind}: {subject}{module}, {first.where or 'line unknown'}"
        yield f"  {first.why}"
        if others:
            names = [str(it.parameter or it.op) for it in others]
            more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
            yield f"  the same of {', '.join(names[:MOST_SHOWN])}{more}"
        yield from (f"  -> {remedy}" for remedy in first.remedies)
    if len(groups) > MOST_SHOWN:
        yield f"... and {len(groups) - MOST_SHOWN} more (--json OUT has them all)"


def examine_silent(
    found: Sequence[SilentFault],
    attempts: Sequence[Attempt],
    findings: Sequence[object],
    is_raised: bool = False,
) -> tuple[SilentFault, ...]:
    """Returns the silent faults with their words, but for what has a finding, or ended the script."""
    loud = {getattr(finding, "where", None) for finding in findings}
    faults = merge_faults(found, attempts)
    kinds = {fault.kind for fault in faults}
    return tuple(
        explain(fault)
        for fault in faults
        if (fault.phase != "forward" or fault.where not in loud) and EXPLAINED.get(fault.kind) not in kinds
        if not (is_raised and fault.kind == "unscaled_twice")
        if fault.kind != "lost_updates" or fault.numbers["share"] > STUCK or is_flat(attempts)
    )


def merge_faults(found: Sequence[SilentFault], attempts: Sequence[Attempt]) -> list[SilentFault]:
    """Returns what several runs found, the same once, at the steps of their attempts."""
    merged: dict[tuple[object, ...], SilentFault] = {}
    for one in found:
        key = (one.kind, one.where, one.op, one.module, one.parameter)
        before = merged[key].steps if key in merged else ()
        steps = (attempts[it].step if it < len(attempts) else it for it in one.steps)
        all_steps = tuple(sorted({*before, *steps}))
        merged[key] = replace(one, step=min(all_steps, default=None), steps=all_steps)
    return sorted(merged.values(), key=lambda it: -1 if it.step is None else it.step)
