"""Arguments of a sweep that cannot work, each with its name: a command line shows names as they are typed."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch import AmpValueError


class ArgumentError(AmpValueError):
    """Arguments cannot work: `faults` says of each its name, its value, and what was expected."""

    def __init__(self, faults: Sequence[tuple[str, object, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{name} {value!r}: {expected}" for name, value, expected in faults))


def check_arguments(*rules: tuple[str, object, bool, str]) -> None:
    """Takes the name of an argument, its value, whether that can work, and what is expected.

    Raises ArgumentError for all at once that cannot work.
    """
    faults = [(name, value, expected) for name, value, works, expected in rules if not works]
    if faults:
        raise ArgumentError(faults)
