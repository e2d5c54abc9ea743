"""Charts of one number a row: bars, bars made of parts, and the values of single seeds on a strip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.web.axes import Axis, axis_over
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.drawing import LINE, WIDTH, cut_end, picture, text, width_of
from ampatch.sweeps.web.markup import Markup, element, join

BAR_ROW, BAR = 34, 11
STRIP_ROW = 20


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its parts, what is written at its end, and how far the value spreads."""

    look: Look
    parts: tuple[float, ...]
    words: str
    whisker: tuple[float, float] | None = None
    strong: bool = False

    @property
    def total(self) -> float:
        """Returns the length of the bar."""
        return sum(self.parts)

    @property
    def reach(self) -> float:
        """Returns how far bar and whisker go."""
        return max(self.total, self.whisker[1] if self.whisker else 0.0)


@dataclass(frozen=True, slots=True)
class Strip:
    """The values of a row, one a run."""

    look: Look
    values: tuple[float, ...]
    counts: bool = True  # for what the chart shows; what diverged does not


@dataclass(frozen=True, slots=True)
class Band:
    """What counts as the same as O0: its mean and how far from it."""

    middle: float
    reach: float


def bar_chart(title: str, bars: Sequence[Bar], *, mark: float | None = None) -> Markup:
    """Returns horizontal bars, each under its name and its number; a thin line is drawn at `mark`."""
    height = BAR_ROW * len(bars) + 4
    longest = max([bar.reach for bar in bars] + [mark or 0.0]) or 1.0
    stretch = (WIDTH - 2) / longest
    drawn = [bar_row(bar, index * BAR_ROW, stretch) for index, bar in enumerate(bars)]
    rule = None
    if mark is not None:
        x = 1 + mark * stretch
        rows = [BAR_ROW * index + LINE + 3 for index in range(len(bars))]
        rule = join(element("line", x1=x, x2=x, y1=y - 2, y2=y + BAR + 2, class_="rule") for y in rows)
    said = "; ".join(f"{bar.look.name}: {bar.words}" for bar in bars) + "."
    return picture(WIDTH, height, title, said, *drawn, rule)


def bar_row(bar: Bar, top: float, stretch: float) -> Markup:
    """Returns a bar with what is written above it."""
    style = "strong" if bar.strong else None
    room = WIDTH - width_of(bar.words) - 14
    words = [
        text(1, top + LINE - 1, cut_end(bar.look.label, room), style=style or "key"),
        text(WIDTH - 1, top + LINE - 1, bar.words, style=style, anchor="end"),
    ]
    return join([*words, *segments(bar, top + LINE + 3, stretch), whisker(bar, top + LINE + 3, stretch)])


def segments(bar: Bar, top: float, stretch: float) -> list[Markup]:
    """Returns the parts of a bar, side by side, with a gap that tells them apart."""
    drawn, x = [], 1.0
    for index, part in enumerate(bar.parts):
        width = max(part, 0.0) * stretch
        gap = 1.5 if len(bar.parts) > 1 and width > 3 else 0
        style = f"part{index}" if len(bar.parts) > 1 else f"{bar.look.style} bar"
        if width > 0:
            drawn.append(element("rect", x=x, y=top, width=width - gap, height=BAR, class_=style))
        x += width
    return drawn


def whisker(bar: Bar, top: float, stretch: float) -> Markup | None:
    """Returns the quartiles of a bar, on it and beyond."""
    if bar.whisker is None:
        return None
    low, high = (f"{1 + max(value, 0.0) * stretch:.1f}" for value in bar.whisker)
    middle = top + BAR / 2
    path = f"M{low} {top + 2}V{top + BAR - 2}M{high} {top + 2}V{top + BAR - 2}M{low} {middle}H{high}"
    return join([element("path", d=path, class_="halo"), element("path", d=path, class_="whisker")])


# ---- Single seeds ----


def strip_chart(title: str, strips: Sequence[Strip], band: Band | None, words: str) -> Markup:
    """Returns the values of each row on a strip of its own, and behind them what counts as the same as O0."""
    left = max(width_of(strip.look.key) for strip in strips) + 8
    bottom = STRIP_ROW * len(strips) + 2
    axis = strip_axis(strips, band, left)
    rows = [
        strip_row(strip, STRIP_ROW * index + STRIP_ROW / 2 + 1, axis) for index, strip in enumerate(strips)
    ]
    ticks = [
        text(axis.place(tick), bottom + LINE + 2, axis.write(tick), anchor="middle") for tick in axis.ticks(4)
    ]
    base = element("line", x1=left, x2=axis.end, y1=bottom, y2=bottom, class_="axis")
    shade = band_behind(band, axis, bottom) if band else None
    return picture(WIDTH, bottom + LINE + 8, title, words, shade, *rows, base, *ticks)


def strip_axis(strips: Sequence[Strip], band: Band | None, left: float) -> Axis:
    """Returns an axis over the values that count, and over the band."""
    values = [value for strip in strips if strip.counts for value in strip.values]
    values = values or [value for strip in strips for value in strip.values]
    values += [band.middle - band.reach, band.middle + band.reach] if band else []
    return axis_over(min(values), max(values), left, WIDTH - 12)


def band_behind(band: Band, axis: Axis, bottom: float) -> Markup:
    """Returns what counts as the same as O0, and its middle."""
    low, high = axis.place(band.middle - band.reach), axis.place(band.middle + band.reach)
    x = axis.place(band.middle)
    shade = element("rect", x=low, y=0, width=max(high - low, 1.0), height=bottom, class_="band")
    return join([shade, element("line", x1=x, x2=x, y1=0, y2=bottom, class_="rule")])


def strip_row(strip: Strip, y: float, axis: Axis) -> Markup:
    """Returns the dots of a row; of those beyond an edge an arrow there tells the number."""
    parts = [
        element("line", x1=axis.start, x2=axis.end, y1=y, y2=y, class_="grid"),
        text(axis.start - 8, y + 4, strip.look.key, style="key", anchor="end"),
    ]
    below = [value for value in strip.values if value < axis.low]
    above = [value for value in strip.values if value > axis.high]
    for value in strip.values:
        if axis.low <= value <= axis.high:
            style = f"{strip.look.style} dot"
            parts.append(element("circle", cx=axis.place(value), cy=y, r=3.5, class_=style))
    if below:
        parts.append(text(axis.start + 2, y + 4, f"\N{LEFTWARDS ARROW} {TYPESET.number(fmean(below))}"))
    if above:
        parts.append(
            text(axis.end, y + 4, f"{TYPESET.number(fmean(above))} \N{RIGHTWARDS ARROW}", anchor="end")
        )
    return join(parts)
