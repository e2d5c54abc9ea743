"""Runs a script at two levels on the same batches, and compares what its modules computed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ampatch.doctor.against.compare import compare
from ampatch.doctor.runs import Run, Seen

Start = Callable[[str, Run], Seen]


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
