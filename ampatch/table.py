"""Cast tables: which torch function runs in which dtype, and why."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from ampatch.errors import TableError


class Cast(enum.Enum):
    """What happens to the floating arguments of an op before it runs.

    - `LOWER`: cast to the half type: the whitelist
    - `FP32`: cast to float32: the blacklist
    - `PROMOTE`: cast to the widest floating type among them
    - `BANNED`: raises when given a half tensor
    - `FP32_INPLACE`: computed in float32, and rounded once into a half self: the functional form is `FP32`
    - `MATCH_SELF`: cast to the dtype of self, which an in-place op cannot change
    - `CUSTOM`: as the reason says: no single cast fits, and casts/custom.py has the code
    """

    LOWER = "lower"
    FP32 = "fp32"
    PROMOTE = "promote"
    BANNED = "banned"
    FP32_INPLACE = "fp32_inplace"
    MATCH_SELF = "match_self"
    CUSTOM = "custom"


LOWER = Cast.LOWER
FP32 = Cast.FP32
PROMOTE = Cast.PROMOTE
BANNED = Cast.BANNED
FP32_INPLACE = Cast.FP32_INPLACE
MATCH_SELF = Cast.MATCH_SELF
CUSTOM = Cast.CUSTOM


@dataclass(frozen=True, slots=True)
class Row:
    """One op, its cast and the reason.

    >>> Row("softmax", FP32, "sums exp(x), which passes 65504 at x = 11.09").cast
    <Cast.FP32: 'fp32'>

    `since` is the first torch version that has the op, `until` the first that does not.
    """

    name: str
    cast: Cast
    reason: str
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True)
class CastTable:
    """The rows of one place in torch, named by its dotted path: "torch.Tensor"."""

    target: str
    rows: tuple[Row, ...]

    def select(self, version: str) -> CastTable:
        """Narrows to the rows that apply to torch `version`.

        >>> old = Row("norm", FP32, "a sum", until="3.0")
        >>> CastTable("torch", (old,)).select("3.0.0a0+git1234").rows
        ()
        """
        now = _release(version)
        return CastTable(self.target, tuple(row for row in self.rows if _holds(row, now)))

    def take(self, *names: str) -> tuple[Row, ...]:
        """Returns the rows of some functions, for another place that has the same ones."""
        rows = {row.name: row for row in self.rows}
        return tuple(rows[name] for name in names)


def _release(version: str) -> tuple[int, ...]:
    """Returns the release numbers; a nightly build has the ops of the release it leads to."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|dev|post)\d*)*(?:\+.*)?", version)
    if match is None:
        raise TableError(f"{version!r} is not a torch version: expected one such as '2.13' or '2.13.0+cpu'")
    return tuple(int(number or 0) for number in match.groups())


def _holds(row: Row, now: tuple[int, ...]) -> bool:
    begun = row.since is None or _release(row.since) <= now
    return begun and (row.until is None or now < _release(row.until))
