"""A rule of the table, and what it can ask of a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampatch.doctor.finding import LOUD, Finding
from ampatch.doctor.rules.remedies import Remedy

Test = Callable[[Finding], bool] | tuple[str, ...]  # these are phases


def has(name: str, value: object = None) -> Test:
    """Asks for a fact, of a value where one is given."""
    return lambda finding: name in finding.facts and value in (None, finding.facts[name])


def becomes(what: str) -> Test:
    """Asks for a constant that half makes something else: "0", "1", "inf" or "-inf"."""
    return lambda finding: "constant" in finding.facts and finding.facts["constant"][1] == what


def is_of_weight(finding: Finding) -> bool:
    return finding.parameter is not None


def breaks_float32(finding: Finding) -> bool:
    """Asks for what is no matter of precision."""
    return finding.float32_survives is False


def is_steep(finding: Finding) -> bool:
    """Asks for a root or a power that has no value there, or no derivative."""
    return finding.is_gradient or finding.kind == "nan" or bool(finding.facts.get("zero"))


FORWARD = ("input", "forward", "loss", "optimizer")
BACKWARD = ("backward",)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which findings it explains, why their numbers are wrong, and what to do, the likeliest first.

    A finding must be of its kinds, of its operations where these are given, and pass all of `tests`. `why` is
    formatted with what `words_for` returns.
    """

    name: str
    why: str
    remedies: tuple[Remedy, ...]
    tests: tuple[Test, ...] = ()
    ops: tuple[str, ...] | None = None
    kinds: tuple[str, ...] = LOUD

    def explains(self, finding: Finding) -> bool:
        """Says whether it explains a finding, if no earlier rule does."""
        is_of = finding.kind in self.kinds and (self.ops is None or finding.op in self.ops)
        phase = "forward" if finding.facts.get("within") else finding.phase
        return is_of and all(
            phase in test if isinstance(test, tuple) else test(finding) for test in self.tests
        )
