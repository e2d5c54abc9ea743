"""Contenders side by side: what was measured of each in one run, and the ratios between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.series import Series
from benchmarks.setting import Setting


@dataclass(frozen=True, slots=True)
class Comparison:
    """One subject, such as a workload in one mode, and a series of numbers of each contender.

    `bases` are the contenders that the others are divided by, where they are there; `failures` says
    of contenders that cannot run why.
    """

    group: str
    subject: str
    variant: str
    unit: str
    setting: Setting
    series: Mapping[str, Series]
    bases: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    are_differences: bool = False

    @property
    def name(self) -> str:
        """Subject and variant."""
        return f"{self.subject}, {self.variant}" if self.variant else self.subject

    def less(self, base: str, variant: str) -> Comparison:
        """What the others have more than `base`, round by round."""
        series = {name: one.subtract(self.series[base]) for name, one in self.series.items() if name != base}
        return replace(self, variant=variant, series=series, are_differences=True)

    def divide(self, contender: str, base: str) -> Series:
        """A contender divided by a base: round by round, or of differences one ratio, of the medians.

        A difference has the noise of two numbers, and in one round may be 0 or less. Where even the
        median of the base is, the ratio is infinite.
        """
        one, other = self.series[contender], self.series[base]
        if not self.are_differences:
            return one.divide(other)
        return Series((one.median / other.median if other.median > 0 else math.inf,))

    def ratios(self, contender: str) -> dict[str, Series]:
        """A contender divided by each of the bases."""
        bases = [base for base in self.bases if base in self.series and base != contender]
        return {base: self.divide(contender, base) for base in bases}

    def rows(self) -> Iterator[dict[str, object]]:
        """The comparison as a result holds it, a row a contender."""
        for contender, series in self.series.items():
            ratios = {base: one.describe() for base, one in self.ratios(contender).items()}
            yield self._describe(contender) | series.describe() | {"ratios": ratios, "failure": None}
        for contender, reason in self.failures.items():
            nothing = {"median": None, "p25": None, "p75": None, "rounds": [], "ratios": {}}
            yield self._describe(contender) | nothing | {"failure": reason}

    def _describe(self, contender: str) -> dict[str, object]:
        return {
            "group": self.group,
            "subject": self.subject,
            "variant": self.variant,
            "contender": contender,
            "unit": self.unit,
            **self.setting.describe(),
        }
