"""Arguments of a sweep that cannot work, each with its name: a command line shows names as they are typed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ampatch import AmpValueError

MORE_THAN_0 = math.ulp(0.0)  # the least number that is


class ArgumentError(AmpValueError):
    """Arguments cannot work: `faults` says of each its name, its value, and what was expected."""

    def __init__(self, faults: Sequence[tuple[str, object, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{name} {value!r}: {expected}" for name, value, expected in faults))


def validate_numbers(
    values: Mapping[str, float | None], least: Mapping[str, tuple[float, str]], most: float = math.inf
) -> None:
    """Raises ArgumentError for all values that are below their least, or above `most`; None may be."""
    faults = [
        (name, value, f"expected {expected}")
        for name, (low, expected) in least.items()
        if (value := values[name]) is not None and not low <= value <= most
    ]
    if faults:
        raise ArgumentError(faults)
