"""Numbers as a reader wants them, in two alphabets: ASCII for terminals, and that of print for the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Outside, a number has an exponent.
SMALLEST, LARGEST = 1e-4, 1e7
FAR = 1e5  # from where on a distance has an exponent
# Between them even a power of 2 is written in full.
SMALLEST_SCALE, LARGEST_SCALE = 1 / 1024, 1024
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Writes numbers: three digits that count, whole numbers in full, and a sign for what is not there."""

    nothing: str
    minus: str
    times: str
    infinity: str
    comma: str
    power: str  # between a base and its exponent; empty: the exponent is raised

    def number(self, value: float | None, digits: int = 3) -> str:
        """Writes so many significant digits, and whole numbers in full.

        >>> [ASCII.number(value) for value in (0.0012345, 9.996, 12345.6, 0.0, None, 1.5e-7, math.nan)]
        ['0.00123', '10.0', '12346', '0', '-', '1.5e-7', 'NaN']
        >>> [TYPESET.number(value) for value in (21.449, 1234567.0, -2.0, None, 1.5e-7, -math.inf)]
        ['21.4', '1,234,567', '−2.00', '–', '1.5e−7', '−∞']
        """  # noqa: RUF002
        if value is None:
            return self.nothing
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else (self.minus if value < 0 else "") + self.infinity
        if not value:
            return "0"
        power = int(f"{value:.{digits - 1}e}".split("e")[1])  # after rounding: 9.996 has that of 10.0
        if not SMALLEST <= abs(value) < LARGEST:
            return self._finish(with_exponent(value, digits))
        return self._finish(f"{value:,.{max(digits - 1 - power, 0)}f}")

    def short(self, value: float | None, digits: int = 4) -> str:
        """Writes a number without zeros at its end, as one that somebody chose, or in a sentence.

        >>> ASCII.short(2.0), ASCII.short(0.95), ASCII.short(123456.0), ASCII.short(0.00012345)
        ('2', '0.95', '123456', '0.0001234')
        """
        return trim(self.number(value, digits))

    def signed(self, value: float | None) -> str:
        """Writes a distance with its sign, and with a digit after the point where it is near.

        >>> [ASCII.signed(value) for value in (-2.449, -0.04, 1234.5, -3.14e7, -math.inf, None)]
        ['-2.4', '0.0', '+1234', '-3.1e7', '-inf', '-']
        >>> [TYPESET.signed(value) for value in (-2.449, 1234.5)]
        ['−2.4', '+1,234']
        """  # noqa: RUF002
        if value is None or not math.isfinite(value):
            return self.number(value)
        size = abs(value)
        text = self._finish(with_exponent(size, 2) if size >= FAR else f"{size:,.{size < 100:d}f}")
        return text if text == "0.0" else ("+" if value > 0 else self.minus) + text

    def ratio(self, value: float | None) -> str:
        """Writes how many times something is.

        >>> ASCII.ratio(1.162), ASCII.ratio(0.09721), TYPESET.ratio(0.0012345), ASCII.ratio(None)
        ('1.16x', '0.10x', '0.00123×', '-')
        """  # noqa: RUF002
        if value is None or not math.isfinite(value):
            return self.number(value)
        return (f"{value:.2f}" if 0.01 <= value < 9.995 else self.number(value)) + self.times

    def percent(self, part: float) -> str:
        """Writes a part in percent.

        >>> ASCII.percent(0.1234), ASCII.percent(0.05), ASCII.percent(1.5), ASCII.percent(0.001)
        ('12.3 %', '5 %', '150 %', '0.1 %')
        """
        return f"{self.short(100 * part, 3)} %"

    def scale(self, value: float | None) -> str:
        """Writes a loss scale: the larger powers of 2, which nearly all are, as such.

        >>> [ASCII.scale(value) for value in (65536.0, 128.0, 1.0, 3000.0, 2.0**-20, None)]
        ['2^16', '128', '1', '3000', '2^-20', '-']
        >>> TYPESET.scale(65536.0), TYPESET.scale(3000.0), TYPESET.scale(4.3)
        ('2¹⁶', '3,000', '4.3')
        """
        if value is None or not math.isfinite(value) or value <= 0:
            return self.number(value)
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5 and not SMALLEST_SCALE < value < LARGEST_SCALE:
            power = str(exponent - 1)
            return f"2{self.power}{power if self.power else power.translate(SUPERSCRIPTS)}"
        return self.short(value)

    def count(self, value: float | None) -> str:
        """Writes how many there are on average.

        >>> ASCII.count(3.0), ASCII.count(1 / 3), TYPESET.count(12345.0), ASCII.count(None)
        ('3', '0.3', '12,345', '-')
        """
        return self.nothing if value is None else self._finish(f"{value:,.{value != round(value):d}f}")

    def plural(self, number: int, thing: str) -> str:
        """Counts things.

        >>> ASCII.plural(1, "seed"), ASCII.plural(3, "seed"), TYPESET.plural(1200, "step")
        ('1 seed', '3 seeds', '1,200 steps')
        """
        return f"{self.count(number)} {thing}{'' if number == 1 else 's'}"

    def _finish(self, text: str) -> str:
        """Puts our signs in the place of Python's."""
        return text.replace(",", self.comma).replace("-", self.minus)


ASCII = Alphabet("-", "-", "x", "inf", "", "^")
TYPESET = Alphabet("–", "−", "×", "∞", ",", "")  # noqa: RUF001


def with_exponent(value: float, digits: int) -> str:
    """Writes a number with an exponent, as short as it can be."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{trim(mantissa)}e{int(exponent)}"


def trim(text: str) -> str:
    """Returns a decimal without zeros at its end."""
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def duration(seconds: float) -> str:
    """Writes a time in the unit that suits it.

    >>> duration(41.6), duration(750), duration(12600)
    ('42 s', '12 min', '3.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def write_left(seconds: float | None) -> str:
    """Writes how long something still takes, empty if that is not known.

    >>> write_left(750), write_left(None)
    ('about 12 min left', '')
    """
    return "" if seconds is None else f"about {duration(seconds)} left"
