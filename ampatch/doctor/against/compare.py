"""Compares two runs at two levels, on the same batches: how far each module is from that at the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ampatch.doctor.against.sample import FILES, Key, is_parameter, read_samples
from ampatch.doctor.growth.curves import name_of
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.run import Run
from ampatch.doctor.runs import Seen
from ampatch.levels.precision import HALF_TYPES
from ampatch.tools.folder import temporary_folder

Start = Callable[[str, Run], Seen]
FACTOR = 4.0  # of eps, in a forward: a rounding is a fraction of eps
SWITCHED = 2.0  # of sqrt(eps), in a backward
TINY = 1e-30  # of a reference whose numbers are all zeros


def compare_levels(
    start: Start, run: Run, level: str, attempts: Sequence[Attempt], unknown: list[str]
) -> dict[str, object] | None:
    """Runs the script at its own level and at another, to the same step; returns the field `against`.

    That is the first of `attempts`, those at its own level, whose gradients are finite, or whose loss is not:
    no other scale cures it. Costs two runs.
    """
    wanted = next((index for index, it in enumerate(attempts) if it.gradients or not it.loss), 0)
    with temporary_folder("doctor") as folder:
        run = replace(run, samples=str(folder), sample=wanted)
        start("compared", run)
        start(level, replace(run, level=level, float32=level == "O0"))
        taken = read_samples(str(folder))
    if len(taken) < len(FILES):
        unknown.append("nothing to compare: no model ran before a step of an optimizer")
        return None
    found = compare(*taken)
    if not found["rows"]:
        unknown.append(f"nothing to compare: at {level} other modules ran, or on other shapes")
    elif not any(row["error"] != 0 for row in found["rows"]):
        unknown.append(f"the script computes the same at {level}: does it call initialize?")
    return {"level": level, **found}


def compare(own: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """Returns the rows of a comparison, in the order of appearance.

    `own` and `other` are what a `Sample` wrote; gradients are divided by its scale. The error of a row is the
    norm of the difference by the norm of the other's numbers, None where some are not finite. `lost` is the
    part of numbers that are zero, and are not at the other level. A row departs if its error is above the
    largest before it by more than is `allowed`: in a forward 4 eps of the half type, in a backward 2
    sqrt(eps), since a rectifier that switches for a part eps of its numbers changes the gradient by
    sqrt(eps). A gradient of a parameter that is far below those of its layer's others, as of a bias before a
    BatchNorm, which has none, is measured by theirs.
    """
    ours: dict[Key, Tensor] = own["tensors"]
    theirs: dict[Key, Tensor] = other["tensors"]
    types = (it.dtype for it in (*ours.values(), *theirs.values()))
    half = next((it for it in types if it in HALF_TYPES), torch.float16)
    eps = torch.finfo(half).eps
    allowed = {"forward": FACTOR * eps, "backward": SWITCHED * math.sqrt(eps)}
    scales = own["scale"], other["scale"]
    norms = layer_norms(theirs, scales[1])
    rows, before = [], 0.0
    for key, one in ours.items():
        two = theirs.get(key)
        if two is None or one.numel() != two.numel():
            continue
        by = scales if key[0] == "backward" else (1.0, 1.0)
        least = math.sqrt(eps) * norms.get(key[:3], 0.0) if is_parameter(key) else 0.0
        error, lost = distance(one.double() / by[0], two.double() / by[1], least)
        rows.append(row_of(key, one, error, lost) | {"departs": error - before > allowed[key[0]]})
        before = max(before, error)
    first = next((index for index, row in enumerate(rows) if row["departs"]), None)
    return {
        "attempt": own["attempt"],
        "half": str(half)[6:],
        "allowed": allowed,
        "first": first,
        "rows": rows,
    }


def layer_norms(tensors: Mapping[Key, Tensor], scale: float) -> dict[tuple[str, str, str], float]:
    """Returns the largest norm of a parameter's gradient in each layer."""
    norms: dict[tuple[str, str, str], float] = {}
    for key, tensor in tensors.items():
        if is_parameter(key):
            norms[key[:3]] = max(norms.get(key[:3], 0.0), tensor.double().norm().item() / scale)
    return norms


def distance(one: Tensor, two: Tensor, least: float = 0.0) -> tuple[float, float]:
    """Returns the relative error of numbers, and the part of them that are zero in `one` alone.

    The error is of the norm of `two`, or of `least` where that is larger.

    >>> distance(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]))
    (0.8, 0.5)
    """
    difference, norm = (one - two).norm().item(), two.norm().item()
    error = 0.0 if difference == 0 else difference / max(norm, least, TINY)
    if not torch.isfinite(one).all() or not torch.isfinite(two).all():
        error = 0.0 if torch.equal(one, two) else float("inf")
    return error, ((one == 0) & (two != 0)).double().mean().item() if one.numel() else 0.0


def row_of(key: Key, tensor: Tensor, error: float, lost: float) -> dict[str, object]:
    """Returns a row: where it is, and how far it is off."""
    return {
        **dict(zip(("phase", "model", "module", "call"), key, strict=False)),
        "parameter": key[-1] if is_parameter(key) else None,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "error": error if math.isfinite(error) else None,
        "lost": lost,
    }


def said_of_comparison(against: dict) -> list[str]:
    """Says which module departs first.

    `against` is what `compare` returns, with the other `level`.
    """
    if against["first"] is None:
        return [f"Compared with {against['level']}, no module departs further than roundings explain."]
    row = against["rows"][against["first"]]
    what = "output" if row["phase"] == "forward" else f"gradient of {row['parameter'] or 'the output'}"
    error = "is not finite" if row["error"] is None else f"is off by {row['error']:.2g}"
    lost = f"; {row['lost']:.0%} of it became 0" if row["lost"] > 0.01 else ""
    return [f"Compared with {against['level']}, {name_of(row)} departs first: its {what} {error}{lost}."]
