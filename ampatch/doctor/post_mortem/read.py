"""Reads a post-mortem, and refuses what is none; a file from somebody else runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ampatch import AmpValueError, ScaleHistory, ScaleUpdate

FORMAT, VERSION = "ampatch post-mortem", 1
MOST_BYTES = 256 * 2**20  # of a file: several times what one can have
PARTS = {
    "alarm": dict,
    "history": dict,
    "opt_level": str,
    "options": dict,
    "models": list,
    "random": dict,
    "where": dict,
}


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What a file holds; its parts are those of the dictionary that `torch.load` returns."""

    alarm: Mapping[str, object]
    history: ScaleHistory
    opt_level: str
    options: Mapping[str, object]
    models: tuple[Mapping[str, object], ...]
    where: Mapping[str, object]


def read(path: Path) -> PostMortem:
    """Reads a file; raises AmpValueError, which says what was found instead."""
    if not path.is_file():
        raise AmpValueError(
            f"{path}: {'a folder' if path.is_dir() else 'no such file'}; expected a post-mortem"
        )
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise AmpValueError(
            f"{path} has {size / 2**20:.0f} MiB: a post-mortem has {MOST_BYTES >> 20} at the most"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling meets
        raise AmpValueError(f"{path} is no post-mortem: {_explain(path, error)}") from None
    try:
        return parse(found)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise AmpValueError(f"{path} is no post-mortem: {error}") from None


def _explain(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin:
        return "the file is empty"
    if not begin.startswith(b"PK"):
        return f"it begins with {begin!r}, and was not written by torch.save"
    first = str(error).partition("\n")[0][:200]
    return f"torch.load(weights_only=True) refuses it, or it is damaged ({first})"


def parse(found: object) -> PostMortem:
    """Checks what was loaded; raises ValueError, TypeError or KeyError for anything but a post-mortem."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        what = (
            f"a dict with {sorted(map(str, found))[:5]}" if isinstance(found, dict) else type(found).__name__
        )
        raise ValueError(f"found {what}; expected what training leaves at its first alarm")
    if found.get("version") != VERSION:
        raise ValueError(
            f"version {found.get('version')!r} was written by another ampatch: expected {VERSION}"
        )
    wrong = [name for name, kind in PARTS.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise ValueError(f"its parts {', '.join(wrong)} are missing or damaged")
    models = tuple(found["models"])
    if not all(isinstance(model, dict) for model in models):
        raise ValueError("its part models is damaged")
    history = parse_history(found["history"])
    return PostMortem(found["alarm"], history, found["opt_level"], found["options"], models, found["where"])


def parse_history(found: Mapping) -> ScaleHistory:
    """Makes a history of its counts and rows."""
    updates = tuple(
        ScaleUpdate(int(step), float(scale), float(after), bool(skipped), finite)
        for step, scale, after, skipped, finite in found["updates"]
    )
    counts = (int(found[name]) for name in ("steps", "skipped", "forgotten"))
    return ScaleHistory(int(found["loss_id"]), updates, *counts)
