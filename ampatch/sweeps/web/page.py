"""Writes a sweep as one page that opens anywhere: no network, no script, no file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.sweep import Sweep
from ampatch.sweeps.web.bytes_table import bytes_figure, bytes_table, casts_figure
from ampatch.sweeps.web.colours import Look, looks_of
from ampatch.sweeps.web.curve_figures import (
    constant_scales,
    curve_lines,
    curves_figure,
    legend,
    panel_figures,
    scale_figures,
    strip_figure,
)
from ampatch.sweeps.web.explained import environment_list, failures, method
from ampatch.sweeps.web.figures import memory_figure, parts_figure, speed_figure
from ampatch.sweeps.web.lines import Line
from ampatch.sweeps.web.markup import Markup, breakable, element
from ampatch.sweeps.web.overview import header, title_of
from ampatch.sweeps.web.style import style_sheet
from ampatch.sweeps.web.tables import metric_names, metric_tables, results_table, time_table

# The browser itself then refuses whatever would come from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

Looks = Mapping[str, Look]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: its heading, its anchor, and what stands in it."""

    heading: str
    anchor: str
    content: tuple[Markup, ...]


def write_page(sweep: Sweep) -> str:
    """Returns the page of a sweep as one HTML file, to be written as UTF-8."""
    looks = looks_of([row.name for row in sweep.rows])
    sections = [section for section in sections_of(sweep, looks) if section.content]
    page = element("html", head(sweep), body(sweep, looks, sections), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def head(sweep: Sweep) -> Markup:
    """Returns what the browser has to know."""
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"ampatch {sweep.environment.ampatch}"),
        element("link", rel="icon", href="data:,"),
        element("title", title_of(sweep.settings)),
        element("style", Markup(style_sheet())),
    )


def body(sweep: Sweep, looks: Looks, sections: Sequence[Section]) -> Markup:
    """Returns the page itself."""
    links = [element("li", element("a", section.heading, href=f"#{section.anchor}")) for section in sections]
    nav = element("nav", element("ul", *links), aria_label="On this page")
    parts = [
        element("section", element("h2", section.heading), *section.content, id=section.anchor)
        for section in sections
    ]
    foot = (
        f"Made by ampatch {sweep.environment.ampatch}; everything measured is in sweep.json beside this file."
    )
    return element("body", header(sweep, looks, nav), element("main", *parts), element("footer", foot))


def sections_of(sweep: Sweep, looks: Looks) -> list[Section]:
    """Returns all parts of the page, also those without content."""
    return [
        Section("Results", "results", results_section(sweep, looks)),
        Section("Speed and memory", "speed", speed_section(sweep, looks)),
        Section("Loss", "loss", loss_section(sweep, looks)),
        Section("Metrics", "metrics", metrics_section(sweep, looks)),
        Section("Loss scale", "loss-scale", scale_section(sweep, looks)),
        Section("Bytes and casts", "bytes", bytes_section(sweep, looks)),
        Section("Failed runs", "failed", tuple(failures(sweep.records))),
        Section("How this was measured", "method", (method(sweep),)),
        Section("Settings and environment", "environment", (environment_list(sweep),)),
    ]


def charts(figures: Sequence[Markup | None]) -> tuple[Markup, ...]:
    """Returns figures side by side, as many as there is room for."""
    present = [it for it in figures if it]
    return (element("div", *present, class_="charts"),) if present else ()


def pair(first: Markup | None, second: Markup | None) -> Markup | None:
    """Returns two figures of one thing, one below the other."""
    present = [it for it in (first, second) if it]
    return element("div", *present, class_="pair") if present else None


def results_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns the table that people decide by, and where there are many metrics tables of these."""
    return (results_table(sweep, looks), *metric_tables(sweep, looks)) if sweep.rows else ()


def speed_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns bars of speed, time and memory, and the table of times."""
    drawn = charts([speed_figure(sweep, looks), parts_figure(sweep, looks), memory_figure(sweep, looks)])
    return (*drawn, time_table(sweep, looks)) if drawn else ()


def loss_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns the loss curves, one chart for each loss, each row beside O0, and the final losses."""
    names = dict.fromkeys(name for it in sweep.records if it.measured for name in it.measured.losses)
    found = {name: curve_lines(sweep, lambda it, name=name: it.losses.get(name)) for name in names}
    titled = {loss_title(name, len(found)): lines for name, lines in found.items()}
    drawn = [curves_figure(sweep, lines, looks, title) for title, lines in titled.items()]
    drawn.append(strip_figure(sweep, looks, "Final loss", lambda it: it.final_loss, lambda row: row.loss))
    if not any(drawn):
        return ()
    parts = [legend_of(list(found.values()), looks), *charts(drawn)]
    for title, lines in titled.items():
        small = panel_figures(sweep, lines, looks)
        if small:
            parts += [
                element("h3", f"{title} beside O0, after the first quarter of the steps"),
                element("div", *small, class_="panels"),
            ]
    return tuple(parts)


def loss_title(name: str, count: int) -> str:
    """Returns what a loss is called: its id matters only where there are several."""
    return "Loss" if count == 1 else f"Loss {name}"


def legend_of(groups: Sequence[Sequence[Line]], looks: Looks) -> Markup:
    """Returns the legend of all rows that have a line in any chart."""
    drawn = {line.row for group in groups for line in group}
    return legend([name for name in looks if name in drawn], looks)


def metrics_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns for each metric its curves, if it has any, and below them its last values."""
    found = {
        name: curve_lines(sweep, lambda it, name=name: it.metrics.get(name)) for name in all_metrics(sweep)
    }
    curves = {name: lines for name, lines in found.items() if any(len(line.mean) > 1 for line in lines)}
    found = dict(sorted(found.items(), key=lambda pair: pair[0] not in curves))  # the grid has no holes then
    drawn = {name: curves_figure(sweep, lines, looks, name) for name, lines in curves.items()}
    last = [
        strip_figure(
            sweep,
            looks,
            f"{name}, last value",
            lambda it, name=name: it.final(name),
            lambda row, name=name: row.metrics.get(name),
        )
        for name in found
    ]
    parts = charts([pair(drawn.get(name), strip) for name, strip in zip(found, last, strict=True)])
    return (legend_of(list(curves.values()), looks), *parts) if any(drawn.values()) else parts


def all_metrics(sweep: Sweep) -> list[str]:
    """Returns the names of all metrics of rows and runs."""
    measured = (name for it in sweep.records if it.measured for name in it.measured.metrics)
    return list(dict.fromkeys([*metric_names(sweep.rows), *measured]))


def scale_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns the histories of loss scales that changed, and words on those that did not."""
    drawn = charts(scale_figures(sweep, looks))
    note = (
        f"Each line is a run; {TYPESET.times} marks a step that was skipped, at the scale that was too large "
        "for it."
    )
    words = [element("p", breakable(words)) for words in constant_scales(sweep)]
    return (element("p", note, class_="note"), *drawn, *words) if drawn else tuple(words)


def bytes_section(sweep: Sweep, looks: Looks) -> tuple[Markup, ...]:
    """Returns the table and the bars of bytes, and the casts."""
    drawn = charts([bytes_figure(sweep, looks), casts_figure(sweep, looks)])
    return tuple(it for it in (*drawn, bytes_table(sweep, looks)) if it)
