"""Silent faults: all numbers stay finite, no step is skipped, and the training is wrong nevertheless."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ampatch.doctor.finding import Finding, merge_steps
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.tape import Op
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.table import explain
from ampatch.doctor.suspects import is_flat

STUCK = 0.97  # of what is updated stays as it was: a fault in any case
# Kinds, by what else tells of them.
EXPLAINED = {
    "scaled_not_backpropagated": "late_backward",
    "not_unscaled": "never_stepped",
    "coarse_angles": "collapsed",
    "rounding": "coarse_angles",
}
# What the library warns of, by its names of misuse: the fault and the operation.
WARNED = {
    "clipping": ("clipped_while_scaled", "clip_grad"),
    "inside": ("unscaled_backward", "backward"),
    "outside": ("unscaled_backward", "backward"),
    "late": ("late_backward", "backward"),
    "GradScaler": ("two_scalers", "step"),
    "halved": ("half_after_initialize", "half"),
    "stranger": ("unknown_optimizer", "step"),
}


class Notes:
    """What was found in one run: each fault once an attempt, which is its step as yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.found: dict[tuple[object, ...], Finding] = {}

    def finding(
        self, kind: str, record: Op, more: Mapping[str, object] = MappingProxyType({}), **facts: object
    ) -> Finding:
        """Returns a fault of an operation at the present attempt; `more` are fields of the finding."""
        place = record.place or Place(None, "", 0)
        site = record.phase, place.model, place.module, record.op, record.where
        return Finding(kind, self._clock.attempt, *site, facts=facts, **more)

    def put(self, fault: Finding) -> None:
        self.found.setdefault((fault.identity, fault.step), fault)

    def add(self, kind: str, record: Op, attempt: int | None = None, **facts: object) -> None:
        """Notes a fault, at the present attempt unless another is given."""
        fault = self.finding(kind, record, **facts)
        self.put(fault if attempt is None else replace(fault, step=attempt))


def examine_silent(
    noticed: Sequence[Finding],
    attempts: Sequence[Attempt],
    findings: Sequence[Finding],
    is_raised: bool = False,
    learns_less: Callable[[], bool] = lambda: False,
) -> tuple[Finding, ...]:
    """Returns the silent faults with their words, but for what has a finding, or ended the script.

    Some are faults only where the loss does not fall, or `learns_less` says that it falls less than in
    float32.
    """
    loud = {finding.where for finding in findings}
    at_steps = [
        replace(fault, step=attempts[fault.step].step) if fault.step in range(len(attempts)) else fault
        for fault in noticed
    ]
    merged = merge_steps(sorted(at_steps, key=lambda finding: -1 if finding.step is None else finding.step))
    kinds = {fault.kind for fault in merged}
    faults = [
        fault
        for fault in merged
        if (fault.phase in ("backward", "optimizer") or fault.where not in loud)
        and EXPLAINED.get(fault.kind) not in kinds
        and not (is_raised and fault.kind == "unscaled_twice")
    ]
    is_fault = not findings and any(map(is_doubtful, faults)) and (is_flat(attempts) or learns_less())
    return tuple(explain(fault) for fault in faults if is_fault or not is_doubtful(fault))


def is_doubtful(fault: Finding) -> bool:
    """Says whether it may do no harm: weights that stay for a while, probabilities, rounding."""
    if fault.kind == "lost_updates":
        return fault.facts["share"] <= STUCK or fault.op == "accumulate_grad"
    return fault.kind in ("saturated", "rounding")
