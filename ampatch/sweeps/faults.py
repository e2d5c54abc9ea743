"""Arguments of a sweep that cannot work, each with its name: a command line shows names as they are typed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampatch import AmpValueError


@dataclass(frozen=True, slots=True)
class ArgumentFault:
    """An argument that cannot work: its name, its value, and what was expected."""

    name: str
    value: object
    expected: str


class ArgumentError(AmpValueError):
    """Arguments cannot work: `faults` says which."""

    def __init__(self, faults: Iterable[ArgumentFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(f"{it.name} {it.value!r}: {it.expected}" for it in self.faults))


def raise_faults(faults: Iterable[ArgumentFault]) -> None:
    """Raises for all of the faults at once, if there are any."""
    found = tuple(faults)
    if found:
        raise ArgumentError(found)
