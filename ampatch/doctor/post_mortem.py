"""What `ampatch doctor --open` shows of a file that training left when it broke."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ampatch import AmpValueError

FORMAT, VERSION = "ampatch post-mortem", 1
PARTS = {"alarm": dict, "history": dict, "opt_level": str, "options": dict, "models": list, "where": dict}
MOST_NAMED = 3  # tensors in a line
MOST_UPDATES = 4

Facts = Mapping[str, object]


def read(path: Path) -> dict:
    """Reads a file, and runs no code of it; raises AmpValueError, which says what was found instead."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise AmpValueError(f"{path}: {what}; expected a post-mortem")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling meets
        fault = _explain(path, error)
    else:
        fault = fault_of(found)
    if fault:
        raise AmpValueError(f"{path} is no post-mortem: {fault}")
    return found


def _explain(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin:
        return "the file is empty"
    if not begin.startswith(b"PK"):
        return f"it begins with {begin!r}, and was not written by torch.save"
    first = str(error).partition("\n")[0][:200]
    return f"torch.load(weights_only=True) refuses it, or it is damaged ({first})"


def fault_of(found: object) -> str:
    """Says why what a file holds is no post-mortem; "" of one."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        is_dict = isinstance(found, dict)
        what = f"a dict with {sorted(map(str, found))[:5]}" if is_dict else type(found).__name__
        return f"found {what}; expected what training leaves at its first alarm"
    if found.get("version") != VERSION:
        return f"version {found.get('version')!r} was written by another ampatch: expected {VERSION}"
    wrong = [name for name, kind in PARTS.items() if not isinstance(found.get(name), kind)]
    return f"its parts {', '.join(wrong)} are missing or damaged" if wrong else ""


def describe(found: dict) -> Iterator[str]:
    """Yields the lines; what stands in the file is shown without characters that steer a terminal."""
    for line in _describe(found):
        yield "".join(character if character.isprintable() else "?" for character in line)


def _describe(found: dict) -> Iterator[str]:
    alarm, where, history = found["alarm"], found["where"], found["history"]
    rank = f", rank {where.get('rank')} of {where.get('ranks')}" if where.get("ranks", 1) != 1 else ""
    yield f"{where.get('script')}{rank}, {where.get('time')}: {alarm.get('message')}"
    later = alarm.get("steps_later")
    if later:
        yield f"  The host knew {later} steps later: batch, weights and gradients are those of that step."
    skipped = f"{history['skipped']} of {history['steps']} steps were skipped"
    yield f"  {found['opt_level']} ({found['options'].get('loss_scale')} loss scale): {skipped}"
    yield f"  scale: {describe_scales(history['updates'])}"
    for model in found["models"]:
        name = str(model.get("name"))
        yield from describe_batch(name, model["batch"])
        for part in ("weights", "gradients"):
            yield f"  {part} of {name}: {describe_ranges(model[part])}"
    device, torch_version = where.get("device"), where.get("torch")
    yield f"  ampatch {where.get('ampatch')}, torch {torch_version}, Python {where.get('python')}, {device}"
    for advice in advise(found):
        yield f"  -> {advice}"


def describe_scales(updates: Sequence[Sequence]) -> str:
    """Says what the last updates did: rows of step, scale, next scale, whether it was skipped ..."""
    shown = [
        f"{scale:g} at step {step}{' (skipped)' if skipped else ''}"
        for step, scale, _, skipped, *_ in updates[-MOST_UPDATES:]
    ]
    return ("..., " if len(updates) > MOST_UPDATES else "") + ", ".join(shown or ["nothing known"])


def describe_batch(model: str, batch: Sequence[Facts]) -> Iterator[str]:
    """Says what the last forward of a model was given."""
    tensors = [facts for facts in batch if "shape" in facts]
    if not tensors:
        yield f"  batch of {model}: not known (no forward since the step before, or a compiled one)"
        return
    shown = sorted(tensors, key=is_broken, reverse=True)[:MOST_NAMED]
    more = f", and {len(tensors) - len(shown)} more" if len(tensors) > len(shown) else ""
    yield f"  batch of {model}: {'; '.join(map(describe_tensor, shown))}{more}"


def describe_tensor(facts: Facts) -> str:
    """Says what is known of one tensor, such as `args[0] float32 [6, 4], 1 nan, first in sample 3`."""
    line = f"{facts.get('name')} {facts.get('dtype')} {facts.get('shape')}"
    if is_broken(facts):
        return f"{line}, {describe_broken(facts)}, first in sample {facts.get('sample')}"
    if "largest" not in facts:
        return line
    return f"{line}, {_number(facts['least'])} to {_number(facts['largest'])}"


def describe_broken(facts: Facts) -> str:
    """Counts what is not finite."""
    return " and ".join(f"{facts[kind]} {kind}" for kind in ("nan", "inf") if facts.get(kind))


def describe_ranges(found: Sequence[Facts]) -> str:
    """Says of many tensors how many are not finite, or which has the largest value."""
    if not found:
        return "none"
    broken = [facts for facts in found if is_broken(facts)]
    if broken:
        names = [f"{facts.get('name')} ({describe_broken(facts)})" for facts in broken[:MOST_NAMED]]
        more = ", ..." if len(broken) > MOST_NAMED else ""
        return f"{len(broken)} of {len(found)} are not finite: {', '.join(names)}{more}"
    ends = [(it.get(end) or 0.0, it.get("name")) for it in found for end in ("least", "largest")]
    largest, name = max((abs(float(end)), str(name)) for end, name in ends)  # type: ignore[arg-type]
    return f"{len(found)}, all finite; the largest value is {largest:.4g}, in {name}"


def is_broken(facts: Facts) -> bool:
    """Whether a tensor held inf or NaN."""
    return bool(facts.get("nan") or facts.get("inf"))


def advise(found: dict) -> Iterator[str]:
    """Yields where to look first, and what can be done with the file."""
    batch, weights, gradients = (
        [facts for model in found["models"] for facts in model[part] if is_broken(facts)]
        for part in ("batch", "weights", "gradients")
    )
    if batch:
        first = batch[0]
        yield f"the batch itself is broken: look at sample {first.get('sample')} of {first.get('name')}"
    elif weights:
        yield "weights are lost: go back to a checkpoint; no loss scale helps now"
    elif found["alarm"].get("kind") == "loss":
        yield "batch and weights are finite: the forward or the loss makes inf or NaN"
    elif gradients and len(gradients) < sum(len(model["gradients"]) for model in found["models"]):
        yield f"the backward overflows from {gradients[-1].get('name')} on: try keep_fp32 for its module"
    yield f"`ampatch doctor {found['where'].get('script')}` finds the line"
    yield "torch.load(FILE, weights_only=True) has the batch and the random state"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
