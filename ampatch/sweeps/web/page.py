"""Writes a sweep as one page that opens anywhere: no network, no script, no file beside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ampatch.sweeps.records.record import LAST_LOSSES
from ampatch.sweeps.records.sweep import Sweep, keys_of
from ampatch.sweeps.terminal.caption import said_of_warmup
from ampatch.sweeps.web.tables import tables_of
from ampatch.tools.page import draw_charts, render


def write_page(sweep: Sweep) -> str:
    """Returns the page of a sweep as one HTML file, to be written as UTF-8; charts need matplotlib."""
    measured = [it.measured for it in sweep.records if it.measured]
    return render(
        Path(__file__).parent,
        sweep.settings.script,
        draw_charts("sweep.html", "ampatch.sweeps.web.charts", sweep),
        sweep=sweep,
        version=sweep.environment.ampatch,
        keys=keys_of(row.name for row in sweep.rows),
        tables=tables_of(sweep),
        warmup=said_of_warmup(sweep),
        on_device={it.memory for it in measured if it.peak_mib is not None} == {"device"},
        last_losses=LAST_LOSSES,
        details=asdict(sweep.settings) | asdict(sweep.environment),
    )
