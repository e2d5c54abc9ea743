"""Text that a terminal can show: nothing that it would obey, nothing that its encoding cannot write."""

from __future__ import annotations


def printable(text: str, encoding: str = "ascii") -> str:
    """Escapes what a terminal would obey, and what an encoding cannot write.

    >>> print(printable("caf\\u00e9 \\x1b[31m"))
    caf\\xe9 \\x1b[31m
    """
    obeyed = "".join(char if char.isprintable() else escape(char) for char in text)
    return obeyed.encode(encoding, "backslashreplace").decode(encoding)


def escape(char: str) -> str:
    """Writes a character as Python does in a string."""
    return char.encode("unicode_escape").decode("ascii")


def cut_middle(text: str, length: int) -> str:
    """Cuts what is too much out of a text, and keeps its last 7 characters.

    >>> cut_middle("O2 keep_batchnorm_fp32=False seed 2", 20)
    'O2 keep_b... seed 2'
    """
    return text if len(text) <= length else f"{text[: length - 11]}... {text[-7:].strip()}"
