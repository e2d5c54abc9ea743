"""Says each kind of misuse once, in the log and as a warning at the line to change."""

from __future__ import annotations

from ampatch.levels.stack import Line, find_line, warn
from ampatch.watching.observers import observers


class Warner:
    """Says each kind of thing once: in the log, and as a warning that points at a line."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def forget(self) -> None:
        """Lets everything be said again."""
        self._said.clear()

    def has_said(self, kind: str) -> bool:
        """Whether a kind of misuse was warned of."""
        return kind in self._said

    def warn(self, kind: str, text: str, line: Line | None = None) -> None:
        """Warns of a kind of misuse; `line` is the one to change, by default the one that runs."""
        if kind not in self._said:
            self._said.add(kind)
            line = line or find_line()
            for observer in observers():
                observer.on_misuse(kind, line)
            warn(text, line)
