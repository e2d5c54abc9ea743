"""The head of the page: what was run, and what to take."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePath

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.sweep import BASELINE, Row, Settings, Sweep
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.markup import Markup, breakable, element, with_flags
from ampatch.sweeps.web.tables import distance_text

METRICS_SHOWN = 2


def title_of(settings: Settings) -> str:
    """Returns the title of the page: the name of the script, without its folders."""
    name = PurePath(settings.script).name or settings.script
    return f"Opt-level sweep of {name}"


def header(sweep: Sweep, looks: Mapping[str, Look], links: Markup) -> Markup:
    """Returns title, facts, recommendation, and links to the parts of the page."""
    return element(
        "header",
        element("h1", breakable(title_of(sweep.settings))),
        *command_of(sweep),
        element("ul", *(element("li", fact) for fact in facts(sweep)), class_="facts"),
        advice(sweep, looks),
        links,
    )


def command_of(sweep: Sweep) -> list[Markup]:
    """Returns the command that was typed, if one was."""
    command = sweep.environment.command
    return [element("p", element("code", breakable(command)), class_="command")] if command else []


def facts(sweep: Sweep) -> list[str]:
    """Returns what was run, where and when, in a few words each."""
    settings, environment = sweep.settings, sweep.environment
    failed = sum(record.failed for record in sweep.records)
    runs = TYPESET.plural(len(sweep.records), "run") + (f", {failed:,} of them failed" if failed else "")
    seeds = TYPESET.plural(settings.seeds, "seed")
    repeat = f", {settings.repeat} runs each" if settings.repeat > 1 else ""
    device = environment.device if environment.device != "cpu" else environment.cpu or "cpu"
    return [
        f"{TYPESET.plural(len(sweep.rows), 'row')}, {seeds}{repeat}",
        runs,
        device,
        f"torch {environment.torch}",
        day(environment.created),
    ]


def day(created: str) -> str:
    """Returns the date of a time stamp as people write it.

    >>> day("2026-11-03T17:05:32+01:00"), day("yesterday")
    ('3 November 2026', 'yesterday')
    """
    try:
        date = datetime.fromisoformat(created)
    except ValueError:
        return created
    months = "January February March April May June July August September October November December"
    return f"{date.day} {months.split()[date.month - 1]} {date.year}"


def advice(sweep: Sweep, looks: Mapping[str, Look]) -> Markup:
    """Returns the recommendation with its reason, and the numbers of the row."""
    it = sweep.recommendation
    row = sweep.row(it.row)
    take = f"Take {it.row}" if it.row else "No level can be recommended"
    return element(
        "section",
        element("h2", "Recommendation"),
        element("p", breakable(take), class_="take"),
        element("p", with_flags(sentence(it.reason)), class_="why"),
        stats(row) if row else None,
        class_="advice",
    )


def sentence(words: str) -> str:
    """Returns words with a capital at the start and a full stop at the end; names stay as they are.

    >>> sentence("the fastest of all"), sentence("O5 is the fastest.")
    ('The fastest of all.', 'O5 is the fastest.')
    """
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) or not words else ".")


def stats(row: Row) -> Markup:
    """Returns the numbers of the row to take, each with what it says of O0."""
    beside = row.name != BASELINE
    found = [
        ("Speed", TYPESET.ratio(row.speed), "of O0" if beside else None, row.speed),
        ("Step", f"{TYPESET.number(row.step_ms.median)} ms" if row.step_ms else "", None, row.step_ms),
        ("Peak memory", TYPESET.ratio(row.memory), f"{TYPESET.number(row.peak_mib)} MiB", row.memory),
        ("Final loss", TYPESET.number(row.loss.value, 4), distance_text(row.loss), row.loss.value),
    ]
    for name, it in list(row.metrics.items())[:METRICS_SHOWN]:
        found.append((name, TYPESET.number(it.value, 4), distance_text(it), it.value))
    pairs = [
        element(
            "div",
            element("dt", breakable(name)),
            element("dd", value, element("small", below) if below else None),
        )
        for name, value, below, known in found
        if known is not None
    ]
    return element("dl", *pairs, class_="stats")
