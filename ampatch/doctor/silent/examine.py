"""Makes silent faults of what the runs of a script have left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.fault import SilentFault, read_faults
from ampatch.doctor.silent.watch import FIRST
from ampatch.doctor.silent.words import remedies, why


def last_watched(attempts: Sequence[Attempt], suspects: Sequence[int]) -> tuple[int, ...]:
    """Returns the attempt up to which a traced run goes on for silent faults: none where something broke."""
    return () if suspects or not attempts else (min(FIRST, len(attempts)) - 1,)


def examine_silent(
    found: Sequence[Mapping], attempts: Sequence[Attempt], findings: Sequence[object]
) -> tuple[SilentFault, ...]:
    """Returns the silent faults with their words, but for those whose line has a finding."""
    loud = {getattr(finding, "where", None) for finding in findings}
    faults = read_faults(found, {index: attempt.step for index, attempt in enumerate(attempts)})
    return tuple(
        replace(fault, why=why(fault), remedies=remedies(fault))
        for fault in faults
        if fault.kind not in ("zeros", "underflow") or fault.where not in loud
    )
