"""Reads a post-mortem, and refuses what is none; a file from somebody else runs no code."""

from __future__ import annotations

from pathlib import Path

import torch

from ampatch import AmpValueError

FORMAT, VERSION = "ampatch post-mortem", 1
PARTS = {"alarm": dict, "history": dict, "opt_level": str, "options": dict, "models": list, "where": dict}


def read(path: Path) -> dict:
    """Reads a file; raises AmpValueError, which says what was found instead."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise AmpValueError(f"{path}: {what}; expected a post-mortem")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling meets
        raise AmpValueError(f"{path} is no post-mortem: {_explain(path, error)}") from None
    try:
        validate(found)
    except ValueError as error:
        raise AmpValueError(f"{path} is no post-mortem: {error}") from None
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


def validate(found: object) -> None:
    """Raises ValueError for anything but a post-mortem."""
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
