"""Writes a report as one page that opens anywhere: no network, no script, no file beside it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ampatch import __version__
from ampatch.doctor.against.compare import said_of_comparison
from ampatch.doctor.finding import Report
from ampatch.doctor.growth.brakes import first_of, said_of_speed
from ampatch.doctor.growth.curves import QUANTITIES, said_of_growth, some
from ampatch.doctor.words import SURVIVES
from ampatch.tools.page import draw_charts, render

MOST_ROWS = 60  # of a table; the JSON has all
SMALLEST = 1e-6  # an error whose bar has no length


def write_page(report: Report, script: str) -> str:
    """Returns the page of a report as one HTML file, to be written as UTF-8; charts need NumPy."""
    growth = report.growth or {"layers": []}
    # Those nearest to overflow come first.
    layers = sorted(growth["layers"], key=lambda it: min(some(it["headroom"]), default=math.inf))
    if against := report.against:
        rows = against["rows"][: max(MOST_ROWS, (against["first"] or 0) + 1)]
        against = against | {"rows": [row | {"bar": bar_of(row["error"])} for row in rows]}
    return render(
        Path(__file__).parent,
        script,
        draw_charts("--html", "ampatch.doctor.page.charts", report, layers),
        report=report,
        survives=SURVIVES,
        layers=[describe_layer(layer) for layer in layers[:MOST_ROWS]],
        against=against,
        said={
            "growth": said_of_growth(report.growth) if report.growth else [],
            "against": said_of_comparison(report.against) if report.against else [],
            "speed": said_of_speed(report.speed) if report.speed else [],
        },
        first_of=first_of,
        version=__version__,
        torch=torch.__version__,
    )


def describe_layer(layer: dict) -> dict[str, object]:
    """Returns a layer with the extremes of its curves."""
    largest = {name: max(some(layer[name]), default=None) for name in QUANTITIES}
    return layer | largest | {"headroom": min(some(layer["headroom"]), default=None)}


def bar_of(error: float | None) -> float:
    """Returns the length of an error's bar: a sixth for each power of ten above 1e-6.

    >>> bar_of(1e-3), bar_of(None), bar_of(0.0)
    (0.5, 1.0, 0.0)
    """
    if error is None:
        return 1.0
    return round(min(max(1 - math.log10(max(error, SMALLEST)) / math.log10(SMALLEST), 0.0), 1.0), 3)
