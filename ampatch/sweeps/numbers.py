"""Numbers as a reader wants them: in ASCII for terminals, and typeset for pages."""

from __future__ import annotations

import math
import re

NOTHING = "-"  # what is not there
# Outside, a number has an exponent.
SMALLEST, LARGEST = 1e-4, 1e7
FAR = 1e5  # from where on a distance has an exponent
# Between them even a power of 2 is written in full.
SMALLEST_SCALE, LARGEST_SCALE = 1 / 1024, 1024
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """Writes so many significant digits, and whole numbers in full.

    >>> [number(value) for value in (0.0012345, 9.996, 12345.6, 0.0, None, 1.5e-7, math.nan)]
    ['0.00123', '10.0', '12346', '0', '-', '1.5e-7', 'NaN']
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if not value:
        return "0"
    power = int(f"{value:.{digits - 1}e}".split("e")[1])  # after rounding: 9.996 has that of 10.0
    if not SMALLEST <= abs(value) < LARGEST:
        return with_exponent(value, digits)
    return f"{value:.{max(digits - 1 - power, 0)}f}"


def short(value: float | None, digits: int = 4) -> str:
    """Writes a number without zeros at its end, as one that somebody chose, or in a sentence.

    >>> short(2.0), short(0.95), short(123456.0), short(0.00012345)
    ('2', '0.95', '123456', '0.0001234')
    """
    return trim(number(value, digits))


def signed(value: float | None) -> str:
    """Writes a distance with its sign, and with a digit after the point where it is near.

    >>> [signed(value) for value in (-2.449, -0.04, 1234.5, -3.14e7, -math.inf, None)]
    ['-2.4', '0.0', '+1234', '-3.1e7', '-inf', '-']
    """
    if value is None or not math.isfinite(value):
        return number(value)
    size = abs(value)
    text = with_exponent(size, 2) if size >= FAR else f"{size:.{size < 100:d}f}"
    return text if text == "0.0" else ("+" if value > 0 else "-") + text


def ratio(value: float | None) -> str:
    """Writes how many times something is.

    >>> ratio(1.162), ratio(0.09721), ratio(0.0012345), ratio(None)
    ('1.16x', '0.10x', '0.00123x', '-')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return (f"{value:.2f}" if 0.01 <= value < 9.995 else number(value)) + "x"


def percent(part: float) -> str:
    """Writes a part in percent.

    >>> percent(0.1234), percent(0.05), percent(1.5), percent(0.001)
    ('12.3 %', '5 %', '150 %', '0.1 %')
    """
    return f"{short(100 * part, 3)} %"


def scale(value: float | None) -> str:
    """Writes a loss scale: the larger powers of 2, which nearly all are, as such.

    >>> [scale(value) for value in (65536.0, 128.0, 1.0, 3000.0, 2.0**-20, None)]
    ['2^16', '128', '1', '3000', '2^-20', '-']
    """
    if value is None or not math.isfinite(value) or value <= 0:
        return number(value)
    mantissa, exponent = math.frexp(value)
    is_power = mantissa == 0.5 and not SMALLEST_SCALE < value < LARGEST_SCALE
    return f"2^{exponent - 1}" if is_power else short(value)


def count(value: float | None) -> str:
    """Writes how many there are on average.

    >>> count(3.0), count(1 / 3), count(12345.0), count(None)
    ('3', '0.3', '12345', '-')
    """
    return NOTHING if value is None else f"{value:.{value != round(value):d}f}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def with_exponent(value: float, digits: int) -> str:
    """Writes a number with an exponent, as short as it can be."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{trim(mantissa)}e{int(exponent)}"


def trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def duration(seconds: float) -> str:
    """Writes a time in the unit that suits it.

    >>> duration(41.6), duration(750), duration(12600)
    ('42 s', '12 min', '3.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def typeset(text: str) -> str:
    """Writes a number that stands in ASCII as it is printed on a page.

    >>> [typeset(text) for text in ("-", "-1.5e-7", "12345.6", "0.12345", "2^16", "1.16x", "-inf")]
    ['–', '−1.5e−7', '12,345.6', '0.12345', '2¹⁶', '1.16×', '−∞']
    """  # noqa: RUF002
    if text == NOTHING:
        return "–"  # noqa: RUF001
    text = re.sub(r"\^(-?\d+)", lambda match: match[1].translate(SUPERSCRIPTS), text)
    text = re.sub(r"(?<![\d.⁰¹²³⁴⁵⁶⁷⁸⁹⁻])\d{4,}", lambda match: f"{int(match[0]):,}", text)
    return re.sub(r"x$", "×", text).replace("-", "−").replace("inf", "∞")  # noqa: RUF001
