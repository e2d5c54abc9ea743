"""Axes of a chart: where a value lies, and which values are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampatch.sweeps.records.numbers import TYPESET, trim
from ampatch.sweeps.records.record import Word

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Kind(Word):
    """How values are spread along an axis."""

    LINEAR = "linear"
    LOG = "log"
    LOG2 = "log2"


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` on a length from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    kind: Kind = Kind.LINEAR

    def place(self, value: float) -> float:
        """Returns where a value lies; what is far outside is put near, for the sake of drawing programs.

        >>> Axis(1, 100, 0, 10, Kind.LOG).place(10.0)
        5.0
        """
        low, high = self._even(self.low), self._even(self.high)
        part = (self._even(value) - low) / (high - low)
        return self.start + (self.end - self.start) * min(max(part, -2.0), 3.0)

    def _even(self, value: float) -> float:
        if self.kind is Kind.LINEAR:
            return value
        return math.log2(value) if value > 0 else -1100.0

    def ticks(self, most: int = 5) -> list[float]:
        """Returns round values inside, as many as that at the most, or a few more.

        >>> Axis(0, 390, 0, 1).ticks(), Axis(0.2, 2.4, 0, 1, Kind.LOG).ticks()
        ([0.0, 100.0, 200.0, 300.0], [0.2, 0.5, 1.0, 2.0])
        """
        if self.kind is Kind.LINEAR:
            return linear_ticks(self.low, self.high, most)
        if self.kind is Kind.LOG2:
            first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
            stride = max(1, math.ceil((last - first + 1) / most))
            return [2.0**power for power in range(first, last + 1, stride)]
        return log_ticks(self.low, self.high, most)

    def write(self, value: float) -> str:
        """Returns the text of a tick.

        >>> Axis(1, 4, 0, 1, Kind.LOG2).write(4.0), Axis(1e-9, 1, 0, 1, Kind.LOG).write(1e-6)
        ('2²', '10⁻⁶')
        """
        if self.kind is Kind.LOG2:
            return "2" + str(round(math.log2(value))).translate(SUPERSCRIPTS)
        power = math.log10(abs(value)) if value and self.kind is Kind.LOG else 0.5
        if power.is_integer() and not -3 <= power < 5:
            return "10" + str(int(power)).translate(SUPERSCRIPTS)
        return tick_text(value)


def axis_over(low: float, high: float, start: float, end: float, kind: Kind = Kind.LINEAR) -> Axis:
    """Returns an axis over values, with some room for a range of none.

    >>> axis = axis_over(5.0, 5.0, 0, 1)
    >>> axis.low < 5.0 < axis.high
    True
    """
    if kind is not Kind.LINEAR:
        first, last = math.log2(low), math.log2(high)
        room = 0.05 * (last - first) or 1.0
        return Axis(2.0 ** max(first - room, -1020), 2.0 ** min(last + room, 1020), start, end, kind)
    room = 0.05 * (high - low) or abs(low) * 0.1 or 1.0
    return Axis(low - room, high + room, start, end)


def tick_text(value: float) -> str:
    """Returns a round value as short as it can be.

    >>> tick_text(0.25), tick_text(-20_000), tick_text(2.5e7), tick_text(1e-7)
    ('0.25', '−20,000', '2.5e7', '1e−7')
    """  # noqa: RUF002
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        text = f"{trim(mantissa)}e{int(exponent)}"
    else:
        text = trim(f"{value:,.6f}")
    return text.replace("-", TYPESET.minus)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    digits = max(0, 1 - math.floor(math.log10(stride)))
    first, last = math.ceil(low / stride), math.floor(high / stride)
    return [round(index * stride, digits) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns powers of ten, and where those are few also 2 and 5 times them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        ticks = [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]
        if len(ticks) <= most + 1:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]
