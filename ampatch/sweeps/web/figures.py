"""The figures of speed and memory: bars with a caption."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.sweep import Row, Sweep, find_row
from ampatch.sweeps.verdicts.summary import step_ms
from ampatch.sweeps.web.bars import Bar, bar_chart
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.markup import Markup, breakable, element

PARTS = ("forward", "backward", "update", "the rest")

Looks = Mapping[str, Look]


def figure(
    drawing: Markup, name: str | Markup, note: str | None = None, below: Markup | None = None
) -> Markup:
    """Returns a drawing with its caption, and below it its legend."""
    small = element("small", note) if note else None
    words = name if isinstance(name, Markup) else element("b", breakable(name))
    return element("figure", element("figcaption", words, small), drawing, below)


# ---- Speed and memory ----


def speed_figure(sweep: Sweep, looks: Looks) -> Markup | None:
    """Returns bars of the speed of each row; of O0's speed if that is known, else in steps a second."""
    rows = [row for row in sweep.rows if row.step_ms and row.step_ms.median > 0]
    if not rows:
        return None
    unit = step_ms(find_row(rows))
    bars = [speed_bar(row, looks, unit, row.name == sweep.recommendation.row) for row in rows]
    drawing = bar_chart("Speed", bars, mark=1.0 if unit else None)
    note = "as a multiple of O0" if unit else "steps a second"
    return figure(drawing, "Speed", f"{note}; whiskers: quartiles")


def speed_bar(row: Row, looks: Looks, unit: float | None, strong: bool) -> Bar:
    """Returns the bar of a row's speed."""
    it = row.step_ms
    assert it is not None, "only rows with a time have a bar"
    value = (row.speed or unit / it.median) if unit else 1000 / it.median
    whole = value * it.median
    known = it.count > 1 and it.low > 0 and math.isfinite(it.high)
    quartiles = (whole / it.high, whole / it.low) if known else None
    words = TYPESET.ratio(value) if unit else f"{TYPESET.number(value)} a second"
    return Bar(looks[row.name], (value,), words, quartiles, strong)


def parts_figure(sweep: Sweep, looks: Looks) -> Markup | None:
    """Returns bars of the time of a step, in parts; None where none were measured."""
    rows = [row for row in sweep.rows if row.step_ms and any(parts_of(row)[:3])]
    if not rows:
        return None
    best = sweep.recommendation.row
    bars = [
        Bar(looks[row.name], parts_of(row), f"{TYPESET.number(step_ms(row))} ms", strong=row.name == best)
        for row in rows
        if row.step_ms
    ]
    drawing = bar_chart("Time of a step in parts", bars)
    return figure(drawing, "Where a step's time goes", "median milliseconds", part_legend(PARTS))


def parts_of(row: Row) -> tuple[float, ...]:
    """Returns the milliseconds of forward, backward and update, and what is left of the step."""
    known = tuple(value or 0.0 for value in (row.forward_ms, row.backward_ms, row.update_ms))
    whole = row.step_ms.median if row.step_ms else 0.0
    return (*known, max(whole - sum(known), 0.0))


def part_legend(names: Sequence[str]) -> Markup:
    """Returns the names of the parts of bars, in the order in which they lie."""
    return element("ul", *(part_item(index, name) for index, name in enumerate(names)), class_="legend")


def part_item(index: int, name: str) -> Markup:
    """Returns the shade of a part, and its name."""
    block = element("rect", x=0, y=4, width=12, height=11, class_=f"part{index}")
    swatch = element("svg", block, viewBox="0 0 14 18", aria_hidden="true")
    return element("li", swatch, element("span", name), class_="block")


def memory_figure(sweep: Sweep, looks: Looks) -> Markup | None:
    """Returns bars of the peak memory of each row."""
    rows = [row for row in sweep.rows if row.peak_mib is not None and math.isfinite(row.peak_mib)]
    if not rows:
        return None
    best = sweep.recommendation.row
    bars = [
        Bar(looks[row.name], (row.peak_mib or 0.0,), memory_words(row), strong=row.name == best)
        for row in rows
    ]
    baseline = find_row(rows)
    mark = baseline.peak_mib if baseline else None
    note = " and ".join(memory_kinds(sweep)) + (" memory; dotted: O0" if mark else " memory")
    return figure(bar_chart("Peak memory", bars, mark=mark), "Peak memory", note)


def memory_kinds(sweep: Sweep) -> list[str]:
    """Returns which memory was measured: "device", "resident", or in a mixed sweep both."""
    measured = [it.measured for it in sweep.records if it.measured]
    return sorted({it.memory for it in measured if it.peak_mib is not None})


def memory_words(row: Row) -> str:
    """Returns the peak memory of a row, and its ratio to that of O0."""
    beside = "" if row.memory is None else f" · {TYPESET.ratio(row.memory)}"
    return f"{TYPESET.number(row.peak_mib)} MiB{beside}"
