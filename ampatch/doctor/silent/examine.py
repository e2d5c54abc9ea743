"""Makes silent faults of what the runs of a script have left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.fault import SilentFault, read_faults
from ampatch.doctor.silent.watch import FIRST
from ampatch.doctor.silent.words import remedies, why

EXPLAINED = {"scaled_not_backpropagated": "late_backward"}  # kinds, by what else tells of them
NEAR = 0.8  # of the worst is as good: an early attempt costs less


def plan_window(attempts: Sequence[Attempt], sample: int | None) -> tuple[int, ...]:
    """Returns attempts up to which a traced run goes on for silent faults: not beyond weights that broke."""
    first = attempts[:FIRST]
    last = next((index for index, attempt in enumerate(first) if not attempt.weights), len(first) - 1)
    return tuple(index for index in (last, sample) if index is not None and index >= 0)


def pick_sample(seen: Sequence[Mapping], attempts: Sequence[Attempt]) -> int | None:
    """Returns the attempt whose gradients are to be compared with float32, the first of the worst."""
    shares = {
        attempt: share
        for attempt, share in (seen[0]["ranges"] if seen else ())
        if attempt < len(attempts) and attempts[attempt].is_finite
    }
    most = max(shares.values(), default=0.0)
    return next((attempt for attempt, share in shares.items() if share >= NEAR * most), None)


def examine_silent(
    seen: Sequence[Mapping], attempts: Sequence[Attempt], findings: Sequence[object]
) -> tuple[SilentFault, ...]:
    """Returns the silent faults with their words, but for those whose line has a finding."""
    loud = {getattr(finding, "where", None) for finding in findings}
    found = [fault for run in seen for fault in run["faults"]]
    faults = read_faults(found, {index: attempt.step for index, attempt in enumerate(attempts)})
    kinds = {fault.kind for fault in faults}
    return tuple(
        replace(fault, why=why(fault), remedies=remedies(fault))
        for fault in faults
        if (fault.phase != "forward" or fault.where not in loud) and EXPLAINED.get(fault.kind) not in kinds
    )
