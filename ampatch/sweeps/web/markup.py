"""HTML and SVG as text in which everything that came from outside is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "link", "br", "wbr"})
SVG_EMPTY = frozenset({"path", "line", "rect", "circle"})
# Terminals understand these: colours, and the cursor movements of progress bars.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
# What XML and HTML do not allow, not even escaped; a tab and the ends of lines stay.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
# Long names may break after these.
JOINTS = re.compile(r"(?<=[_/\\=.,:-])(?=\w)")
# An option of a command line, its value if that is a number, and what ends the sentence.
FLAG = re.compile(r"((?<!\S)--[a-z][a-z-]*(?: [\d.]+)?\S?)")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | None


def escape(text: str) -> Markup:
    r"""Returns text as markup; what is no character of a page becomes a replacement character.

    >>> escape("<b> & \x1b[31m'\x00'")
    '&lt;b&gt; &amp; &#x27;\ufffd&#x27;'
    """
    if isinstance(text, Markup):
        return text
    # Names of files may hold lone surrogates, which cannot be written as UTF-8.
    clean = ANSI.sub("", text).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(CONTROL.sub("\ufffd", clean)))


def breakable(text: str) -> Markup:
    """Returns text as markup that breaks between words, and only in a long word after a joint.

    >>> print(breakable("top5_accuracy"))
    top5_<wbr>accuracy
    >>> print(breakable("O2 loss_scale"))
    O2 <span class="word">loss_<wbr>scale</span>
    """
    if " " not in text:
        return Markup("<wbr>".join(escape(part) for part in JOINTS.split(text)))
    words = (breakable(word) for word in text.split(" "))
    return Markup(
        " ".join(element("span", word, class_="word") if "<wbr>" in word else word for word in words)
    )


def with_flags(text: str) -> Markup:
    """Returns text as markup in which no option is parted from its value, and no number from its `%`.

    >>> print(with_flags("give --seeds 3."))
    give <span class="flag">--seeds 3.</span>
    """
    parts = FLAG.split(text.replace(" %", "\N{NO-BREAK SPACE}%"))
    return join(
        element("span", part, class_="flag") if index % 2 else part for index, part in enumerate(parts)
    )


def join(children: Iterable[Child]) -> Markup:
    """Returns the children one after the other, each escaped unless it is markup."""
    return Markup("".join(escape(child) for child in children if child is not None))


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Returns an element; `_` in an attribute becomes `-`, one at the end is left out, None is no attribute.

    >>> print(element("p", "1 < 2", element("br"), class_="note"))
    <p class="note">1 &lt; 2<br></p>
    >>> print(element("line", x1=0.25, stroke_width=2))
    <line x1="0.2" stroke-width="2"/>
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{attribute_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    if name in SVG_EMPTY and not children:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def attribute_text(value: str | int | float) -> str:
    """Returns a value as it stands in an attribute; a coordinate has one digit after the point."""
    return coordinate(value) if isinstance(value, float) else escape(str(value))


def coordinate(value: float) -> str:
    """Returns a coordinate in tenths, as short as it can be.

    >>> coordinate(12.04), coordinate(-0.01), coordinate(3.25)
    ('12', '0', '3.2')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
