"""What a report holds beside findings: growth of layers, what slows the script down, two levels compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ampatch.doctor.against.capture import Capture
from ampatch.doctor.against.compare import compare, said_of_comparison
from ampatch.doctor.brakes import Brakes, said_of_speed
from ampatch.doctor.finding import Report
from ampatch.doctor.growth.curves import said_of_growth
from ampatch.doctor.growth.notes import Growth

if TYPE_CHECKING:
    from ampatch.doctor.campaign import Seen
    from ampatch.doctor.child import Run

Start = Callable[[str, "Run"], "Seen"]


def listen_beside(run: Run, seen: dict[str, object], undo: ExitStack) -> None:
    """Enters what a run asks for; what was noted stands in `seen` when all is undone.

    Entered before a trace, whose mode then is above that of `Brakes`.
    """
    if run.every is not None:
        growth = Growth(run.every)
        undo.callback(lambda: seen.update(growth=growth.to_json()))
        growth.listen(undo)
    if run.speed:
        brakes = Brakes()
        undo.callback(lambda: seen.update(speed=brakes.to_json()))
        brakes.listen(undo)
    if run.capture:
        capture = Capture(run.wanted)
        undo.callback(lambda: capture.save(run.capture))
        capture.listen(undo)


def compare_levels(start: Start, run: Run, level: str, unknown: list[str]) -> dict[str, object] | None:
    """Runs the script at its own level and at another, on the same batches; returns the field `against`.

    Both runs end at the first attempt at a step whose gradients are finite at the script's own level, or
    whose forward is not. The weights are held up to there.
    Costs two runs.
    """
    with tempfile.TemporaryDirectory(prefix="ampatch-doctor-") as folder:
        own, other = (str(Path(folder, name)) for name in ("own.pt", "other.pt"))
        attempts = start("compared", replace(run, capture=own)).attempts
        seen = torch.load(own)
        if not seen["tensors"]:
            unknown.append("nothing to compare: no model ran before a step of an optimizer")
            return None
        against = replace(run, level=level, float32=level == "O0", capture=other, wanted=seen["attempt"])
        others = start(f"{level}", against).attempts
        theirs = torch.load(other)
    scales = [(each[-1].scale if each else None) or 1.0 for each in (attempts, others)]
    found = compare(seen, theirs, scales)
    if not found["rows"]:
        unknown.append(f"nothing to compare: at {level} other modules ran, or on other shapes")
    elif not any(row["error"] != 0 for row in found["rows"]):
        unknown.append(f"the script computes the same at {level}: does it call initialize?")
    return {"level": level, **found}


def said_beside(report: Report) -> Iterator[str]:
    """Yields the lines of a terminal on all that."""
    if report.growth:
        yield from said_of_growth(report.growth)
    if report.against:
        yield from said_of_comparison(report.against)
    if report.speed and not report.findings and (said := said_of_speed(report.speed)):
        yield "Why mixed precision may not be faster here:"
        yield from (f"  - {line}" for line in said)
