"""What a row says of one thing that scripts of earlier years say and that breaks today."""

from __future__ import annotations

from dataclasses import dataclass

BREAKS, MAY_BREAK, WARNS, NEEDS_CUDA = "BREAKS", "may break", "warns", "needs CUDA"


@dataclass(frozen=True, slots=True)
class Old:
    """One thing that scripts say: a dotted name, or a pattern of code that finding.py knows by this name.

    `since` is the first version that does not take it, and may say until which. `new` is the dotted name
    of what `ampatch run --legacy` puts in the place of a name, with a colon after that of a module;
    `mends` says that it mends the pattern.
    `error` are words of the error, for what dies in lines that do not show it.
    """

    name: str
    since: str
    remedy: str
    new: str | None = None
    status: str = BREAKS
    mends: bool = False
    error: str = ""

    @property
    def is_mended(self) -> bool:
        return self.mends or self.new is not None

    @property
    def is_module(self) -> bool:
        return self.new is not None and self.new.endswith(":")

    @property
    def advice(self) -> str:
        """Since when it breaks, what to write, and whether it can run as it is."""
        if self.status == NEEDS_CUDA:
            return self.remedy
        mended = "; `ampatch run --legacy` mends it" if self.is_mended else ""
        return f"since {self.since}: use {self.remedy}{mended}"
