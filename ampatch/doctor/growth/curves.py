"""The curves of layers: how large their numbers are at each attempt, and where they began to grow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from ampatch.doctor.instruments.values import HALF
from ampatch.doctor.instruments.watch import Attempt
from ampatch.tools import numbers

QUANTITIES = ("output", "gradient", "gradient_norm", "weight")
GROWN = 4.0  # times what it was at first: more than training usually does
STILL = 1.5  # times what it was at first: not yet growing
NEAR = 16.0  # a headroom that is small
AT_FIRST = 5  # points that say what was there at first
TOGETHER = 0.1  # of the time up to the end: layers that begin so close begin together

Curve = list[float | None]


def describe_growth(notes: dict, attempts: Sequence[Attempt]) -> dict[str, object]:
    """Returns the field `growth` of a report; `notes` are what `Growth` left.

    `layers` has for each layer, in the order in which they ran, its curves over `attempts`: the largest
    magnitude of its output, of its weights, and of its gradients with their norm, both without the loss
    scale; and its headroom, which is the largest number of the half type by the largest magnitude of output
    and gradient, with the loss scale, 0 where it overflowed. None stands for what did not run or is not
    finite. `overflows` counts attempts, also those that are not among `attempts`.
    """
    half = next((it["dtype"] for it in notes["layers"] if it["dtype"] in HALF), "float16")
    limit = torch.finfo(getattr(torch, half)).max
    there = [index for index in notes["attempts"] if index < len(attempts)]
    scales = [attempts[index].scale or 1.0 for index in there]
    layers = []
    for layer in notes["layers"]:
        curves = {name: layer[name][: len(there)] for name in QUANTITIES}
        rooms = [headroom(*pair, limit) for pair in zip(curves["output"], curves["gradient"], strict=True)]
        for name, curve in curves.items():
            by = scales if name.startswith("gradient") else [1.0] * len(there)
            curves[name] = [finite(*pair) for pair in zip(curve, by, strict=True)]
        layers.append(layer | curves | {"headroom": rooms})
    steps = [attempts[index].step for index in there]
    began = began_of(layers, there, limit)
    return {"half": half, "limit": limit, "attempts": there, "steps": steps, "layers": layers, "began": began}


def finite(value: float | None, scale: float = 1.0) -> float | None:
    """Returns a value without its scale, None if it is not finite."""
    return value / scale if value is not None and math.isfinite(value) else None


def headroom(output: float | None, gradient: float | None, limit: float) -> float | None:
    """Returns how many times larger the numbers may become; 0 where they overflowed.

    >>> headroom(655.04, 65.5, 65504.0), headroom(math.inf, 1.0, 65504.0), headroom(None, None, 65504.0)
    (100.0, 0.0, None)
    """
    values = [it for it in (output, gradient) if it is not None]
    if not values:
        return None
    return limit / (max(values) or 2.0**-126) if all(map(math.isfinite, values)) else 0.0


# ---- Where growth began ----


def began_of(layers: Sequence[dict], attempts: Sequence[int], limit: float) -> dict[str, object] | None:
    """Returns where growth began that ends near an overflow, None where nothing grew.

    That is the first layer, in the order in which they run, of those that began to grow first: what
    overflows later may only be handed on. Gradients run backwards, and are looked at where no output grew.
    """
    for name, order in (("output", layers), ("gradient", layers[::-1])):
        found = first_to_grow([it[name] for it in order])
        reached = found and nearest(name, layers, found[1], limit)
        if not reached:
            continue
        grown = order[found[0]]
        return {
            "model": grown["model"],
            "module": grown["module"],
            "quantity": name,
            "attempt": attempts[found[1]],
            "times": times(grown[name]),
            "weight_times": times(grown["weight"]) if some(grown["weight"]) else None,
            "reached": {"model": reached["model"], "module": reached["module"]},
        }
    return None


def nearest(name: str, layers: Sequence[dict], start: int, limit: float) -> dict | None:
    """Returns the layer that is nearest to overflow after a point, None if none comes near.

    A dynamic scale keeps gradients near it: these count where they overflow.
    """

    def room(layer: dict) -> float:
        if name == "output" and not layer["overflows"]:
            return limit / max([*some(layer["output"]), 1 / limit])
        return min(some(layer["headroom"][start:]), default=math.inf)

    layer = min(layers, key=room)
    return layer if room(layer) < (NEAR if name == "output" else math.ulp(0.0)) else None


def first_to_grow(curves: Sequence[Curve]) -> tuple[int, int] | None:
    """Returns the index of the first curve that grew, and the index of the point where it began.

    >>> first_to_grow([[1.0] * 9, [1.0] * 6 + [3.0, 9.0, 27.0], [1.0] * 6 + [4.0, 16.0, None]])
    (1, 5)
    """
    starts = {index: start for index, curve in enumerate(curves) if (start := start_of(curve)) is not None}
    if not starts:
        return None
    first, length = min(starts.values()), max(map(len, curves))
    near = first + TOGETHER * (length - first)
    index = next(index for index, start in starts.items() if start <= near)
    return index, starts[index]


def start_of(curve: Curve) -> int | None:
    """Returns the last point at which a curve was as at first, if it has grown to its end."""
    points = [(index, value) for index, value in enumerate(curve) if value is not None]
    if len(points) < 2:
        return None
    before = at_first(curve)
    if not points[-1][1] > GROWN * before:
        return None
    return max((index for index, value in points if value <= STILL * before), default=points[0][0])


def at_first(curve: Curve) -> float:
    """Returns what a curve was at first: the median of a few points, of the first of a short one."""
    values = some(curve)
    return statistics.median(values[: max(1, min(AT_FIRST, len(values) // 4))])


def times(curve: Curve) -> float | None:
    """Returns how many times larger a curve is at its end than at first."""
    before = at_first(curve)
    return some(curve)[-1] / before if before else None


def facts_of(growth: dict) -> dict[str, object]:
    """Returns how many times larger than at first weights are, or outputs that grew: "grown"; and where."""
    curves = [some(layer["weight"]) for layer in growth["layers"]]
    began = growth["began"] or {"quantity": ""}
    is_output = began["quantity"] == "output"
    times_output = (is_output and began["times"]) or 1.0
    return {
        "grown": max([times_output, *(max(it) / at_first(it) for it in curves if it and at_first(it))]),
        "grew": f", from step {began['attempt']} on in {name_of(began)}" if is_output else "",
    }


def some(curve: Curve) -> list[float]:
    """Returns the values that there are."""
    return [value for value in curve if value is not None]


def name_of(layer: Mapping[str, str]) -> str:
    """Returns the name of a layer, after that of its model."""
    return f"{layer['model']}.{layer['module']}" if layer["module"] else layer["model"] or "the script"


def said_of_growth(growth: dict) -> list[str]:
    """Says in a sentence where growth began, nothing where nothing grew.

    `growth` is what `describe_growth` returns.
    """
    began = growth.get("began")
    if not began:
        return []
    of = "" if began["quantity"] == "output" else "gradients of "
    weight = began["weight_times"] or 0.0
    cause = f"; its weights are {numbers.short(weight, 3)} times as large" if weight > GROWN / 2 else ""
    reached = name_of(began["reached"])
    last = f" Nearest to overflow: {reached}." if reached != name_of(began) else ""
    factor = f" {numbers.short(began['times'], 3)}-fold" if began["times"] else ""
    return [
        f"Growth began at step {began['attempt']} in {of}{name_of(began)},{factor} by the end{cause}.{last}"
    ]
