"""Text that a terminal can show: nothing that it would obey."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escapes what a terminal would obey, and halves of characters, which no encoding can write.

    >>> print(printable("caf\\u00e9 \\x1b[31m"))
    café \\x1b[31m
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def cut_middle(text: str, length: int) -> str:
    """Cuts what is too much out of a text, and keeps its last 7 characters.

    >>> cut_middle("O2 keep_batchnorm_fp32=False seed 2", 20)
    'O2 keep_b... seed 2'
    """
    return text if len(text) <= length else f"{text[: length - 11]}... {text[-7:].strip()}"
