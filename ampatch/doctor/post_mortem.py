"""What `ampatch doctor --open` shows of a file that training left when it broke."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import torch

from ampatch import AmpValueError

FORMAT, VERSION = "ampatch post-mortem", 1
PARTS = {"alarm": dict, "history": dict, "opt_level": str, "options": dict, "models": list, "where": dict}
MOST_BYTES = 2**28  # of what is no tensor: training leaves a few MiB
MOST_CHARACTERS = 500  # of a value
MOST_MODELS = 32
MOST_NAMED = 3  # tensors in a line
MOST_UPDATES = 4

Facts = Mapping[str, object]


def read(path: Path) -> dict:
    """Reads a file, and runs no code of it; raises AmpValueError, which says what was found instead.

    Tensors are mapped from the file: a large one costs no memory.
    """
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise AmpValueError(f"{path}: {what}; expected a post-mortem")
    try:
        fault = _fault_of_archive(path)
        contents = None if fault else torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever unpickling meets
        first = readable(str(error).partition("\n")[0])
        fault = f"torch.load(weights_only=True) refuses it, or it is damaged ({first})"
    if fault := fault or fault_of(contents):
        raise AmpValueError(f"{path} is no post-mortem: {fault}")
    return contents


def _fault_of_archive(path: Path) -> str:
    """Says what in a file torch.save never writes; a packed file may unpack to any size."""
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin:
        return "the file is empty"
    if not begin.startswith(b"PK"):
        return f"it begins with {begin!r}, and was not written by torch.save"
    with ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != ZIP_STORED for record in records):
        return "it is compressed, and was not written by torch.save"
    objects = sum(record.file_size for record in records if record.filename.endswith(".pkl"))
    return f"it holds {objects:,} bytes beside its tensors" if objects > MOST_BYTES else ""


def fault_of(contents: object) -> str:
    """Says why what a file holds is no post-mortem; "" of one."""
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        is_dict = isinstance(contents, dict)
        what = f"a dict with {sorted(map(readable, contents))[:5]}" if is_dict else type(contents).__name__
        return f"found {what}; expected what training leaves at its first alarm"
    version = contents.get("version")
    if type(version) is not int or version != VERSION:
        return f"version {readable(version)} was written by another ampatch: expected {VERSION}"
    wrong = [name for name, kind in PARTS.items() if not isinstance(contents.get(name), kind)]
    return f"its parts {', '.join(wrong)} are missing or damaged" if wrong else ""


def readable(value: object) -> str:
    """Returns the begin of what stands in a file, without characters that steer a terminal."""
    is_shape = isinstance(value, list) and all(isinstance(size, int) for size in value)
    # Lists that hold one another can be of any length when they are written out.
    is_plain = is_shape or value is None or isinstance(value, (bool, int, float, str, Exception))
    text = str(value) if is_plain else f"<{type(value).__name__}>"
    begin = text[:MOST_CHARACTERS] + ("..." if len(text) > MOST_CHARACTERS else "")
    return "".join(character if character.isprintable() else "?" for character in begin)


def describe(contents: dict) -> Iterator[str]:
    """Yields the lines; raises what it raises of values that training does not leave."""
    models = contents["models"][:MOST_MODELS]
    alarm, where, history = contents["alarm"], contents["where"], contents["history"]
    has_ranks = where.get("ranks", 1) != 1
    rank = f", rank {readable(where.get('rank'))} of {readable(where['ranks'])}" if has_ranks else ""
    script = readable(where.get("script"))
    yield f"{script}{rank}, {readable(where.get('time'))}: {readable(alarm.get('message'))}"
    if later := alarm.get("steps_later"):
        of_what = "batch, weights and gradients are those of that step"
        yield f"  The host knew {readable(later)} steps later: {of_what}."
    level, scale = readable(contents["opt_level"]), readable(contents["options"].get("loss_scale"))
    skipped = f"{readable(history['skipped'])} of {readable(history['steps'])} steps were skipped"
    yield f"  {level} ({scale} loss scale): {skipped}"
    yield f"  scale: {describe_scales(history['updates'])}"
    for model in models:
        name = readable(model.get("name"))
        yield from describe_batch(name, model["batch"])
        for part in ("weights", "gradients"):
            yield f"  {part} of {name}: {describe_ranges(model[part])}"
    if len(models) < len(contents["models"]):
        yield f"  and {len(contents['models']) - len(models)} more models"
    versions = f"ampatch {readable(where.get('ampatch'))}, torch {readable(where.get('torch'))}"
    yield f"  {versions}, Python {readable(where.get('python'))}, {readable(where.get('device'))}"
    for advice in advise(models, alarm.get("kind")):
        yield f"  -> {advice}"
    yield f"  -> `ampatch doctor {script}` finds the line"
    yield "  -> torch.load(FILE, weights_only=True) has the batch and the random state"


def describe_scales(updates: Sequence[Sequence]) -> str:
    """Says what the last updates did: rows of step, scale, next scale, whether it was skipped ..."""
    shown = [
        f"{scale:g} at step {readable(step)}{' (skipped)' if skipped else ''}"
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
    line = " ".join(readable(facts.get(name)) for name in ("name", "dtype", "shape"))
    if is_broken(facts):
        return f"{line}, {describe_broken(facts)}, first in sample {readable(facts.get('sample'))}"
    if "largest" not in facts:
        return line
    return f"{line}, {_number(facts['least'])} to {_number(facts['largest'])}"


def describe_broken(facts: Facts) -> str:
    return " and ".join(f"{readable(facts[kind])} {kind}" for kind in ("nan", "inf") if facts.get(kind))


def describe_ranges(ranges: Sequence[Facts]) -> str:
    """Says of many tensors how many are not finite, or which has the largest value."""
    if not ranges:
        return "none"
    broken = [facts for facts in ranges if is_broken(facts)]
    if broken:
        names = [f"{readable(facts.get('name'))} ({describe_broken(facts)})" for facts in broken[:MOST_NAMED]]
        more = ", ..." if len(broken) > MOST_NAMED else ""
        return f"{len(broken)} of {len(ranges)} are not finite: {', '.join(names)}{more}"
    ends = [
        (entry.get(end) or 0.0, readable(entry.get("name")))
        for entry in ranges
        for end in ("least", "largest")
    ]
    largest, name = max((abs(float(end)), name) for end, name in ends)  # type: ignore[arg-type]
    return f"{len(ranges)}, all finite; the largest value is {largest:.4g}, in {name}"


def is_broken(facts: Facts) -> bool:
    return bool(facts.get("nan") or facts.get("inf"))


def advise(models: Sequence[Mapping], kind: object) -> Iterator[str]:
    """Yields where to look first."""
    batch, weights, gradients = (
        [facts for model in models for facts in model[part] if is_broken(facts)]
        for part in ("batch", "weights", "gradients")
    )
    if batch:
        sample, name = readable(batch[0].get("sample")), readable(batch[0].get("name"))
        yield f"the batch itself is broken: look at sample {sample} of {name}"
    elif weights:
        yield "weights are lost: go back to a checkpoint; no loss scale helps now"
    elif kind == "loss":
        yield "batch and weights are finite: the forward or the loss makes inf or NaN"
    elif gradients and len(gradients) < sum(len(model["gradients"]) for model in models):
        name = readable(gradients[-1].get("name"))
        yield f"the backward overflows from {name} on: try keep_fp32 for its module"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else readable(value)
