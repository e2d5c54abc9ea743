"""Cast tables: which torch function runs in which dtype, and why."""

from __future__ import annotations

import enum
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


def validate(
    tables: Iterable[CastTable],
    version: str,
    resolve: Callable[[str], object] = pkgutil.resolve_name,
) -> None:
    """Raises one `TableError` that lists every fault of the tables, one per line.

    `resolve` maps a target's dotted path to the object that has the ops. It must see torch
    unpatched: two wrappers of one function are two functions.
    """
    now = _release(version)
    faults: list[str] = []
    held: list[tuple[str, Row]] = []  # the rows that hold in this torch, with their targets
    for target, row in [(table.target, row) for table in tables for row in table.rows]:
        faults += [f"{target}.{row.name}: {fault}" for fault in _faults(row)]
        if not _version_faults(row) and _holds(row, now):
            held.append((target, row))
    counts = Counter(f"{target}.{row.name}" for target, row in held)
    faults += [
        f"{path}: {count} rows hold in torch {version}; keep one, or separate them with since= and until="
        for path, count in counts.items()
        if count > 1
    ]
    faults += _torch_faults(held, version, resolve)
    if faults:
        raise TableError("\n".join(faults))


def _release(version: str) -> tuple[int, ...]:
    """Returns the release numbers; a nightly build has the ops of the release it leads to."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|dev|post)\d*)*(?:\+.*)?", version)
    if match is None:
        raise TableError(f"{version!r} is not a torch version: expected one such as '2.13' or '2.13.0+cpu'")
    return tuple(int(number or 0) for number in match.groups())


def _holds(row: Row, now: tuple[int, ...]) -> bool:
    begun = row.since is None or _release(row.since) <= now
    return begun and (row.until is None or now < _release(row.until))


def _faults(row: Row) -> Iterator[str]:
    """Yields what is wrong with a row whatever torch is installed."""
    if not isinstance(row.cast, Cast):
        yield f"unknown cast {row.cast!r}; expected one of {', '.join(cast.name for cast in Cast)}"
    lines = row.reason.strip().splitlines()
    if not lines:
        yield "no reason; say in one line why the op has its cast"
    if len(lines) > 1:
        yield f"the reason has {len(lines)} lines; say it in one"
    yield from _version_faults(row)


def _version_faults(row: Row) -> list[str]:
    faults = []
    releases = []
    for field, version in (("since", row.since), ("until", row.until)):
        try:
            releases.append(None if version is None else _release(version))
        except TableError as error:
            faults.append(f"{field}={error}")
    if not faults and None not in releases and releases[0] >= releases[1]:
        faults.append(
            f"since={row.since!r} is not before until={row.until!r}; no torch version is in between"
        )
    return faults


def _torch_faults(
    held: list[tuple[str, Row]], version: str, resolve: Callable[[str], object]
) -> Iterator[str]:
    """Yields the disagreements between the rows and the torch that is installed."""
    places: dict[str, object] = {}
    for target in dict.fromkeys(target for target, _ in held):
        try:
            places[target] = resolve(target)
        except (ImportError, AttributeError, ValueError):
            yield f"{target}: no such module or class in torch {version}; correct the target"
    # The function is kept beside its first row: an id may be reused once its object is gone.
    first: dict[int, tuple[object, str, Row]] = {}
    for target, row in [(target, row) for target, row in held if target in places]:
        path, function = f"{target}.{row.name}", getattr(places[target], row.name, None)
        if function is None:
            yield f"{path}: no such function in torch {version}; if torch removed it, give the row until="
        elif not callable(function):
            yield f"{path}: not a function but {function!r}; a row names something callable"
        else:
            _, other_path, other = first.setdefault(id(function), (function, path, row))
            if other.cast is not row.cast and other_path != path:
                names = [str(getattr(one.cast, "name", repr(one.cast))) for one in (other, row)]
                yield (
                    f"{other_path} and {path}: two names of one function, with casts "
                    f"{' and '.join(names)}; give them the same"
                )
