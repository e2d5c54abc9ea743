"""Compares two sweeps, of two commits or two machines, and says what got worse."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from ampatch import AmpValueError
from ampatch.sweeps.columns import LIMITED
from ampatch.sweeps.records.sweep import Environment, Settings, Sweep
from ampatch.sweeps.verdicts.change import Limits, RowChange
from ampatch.sweeps.verdicts.distance import distances
from ampatch.sweeps.verdicts.summary import finished, runs_of

TRAINING = ("script", "arguments", "steps", "nproc_per_node")  # what is trained, and for how long
SETTINGS = ("script", "seeds", "repeat", "warmup", "devices")
ENVIRONMENT = ("device", "cpu", "cores", "threads", "platform", "torch", "python", "ampatch", "commit")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sweeps side by side: a change for each row, what differs besides, and what was allowed.

    `sides` says of each of the two sweeps which it is.
    """

    rows: tuple[RowChange, ...]
    notes: tuple[str, ...]
    limits: Limits
    sides: tuple[str, str]

    @property
    def regressions(self) -> list[str]:
        """Returns a sentence for each thing that got worse; none if all is well.

        That nothing could be compared is no good news either: whoever waits for bad news would wait for ever.
        """
        found = [regression.sentence for change in self.rows for regression in change.regressions]
        if not found and all(change.obstacle for change in self.rows):
            return ["Nothing could be compared: no level finished in both sweeps"]
        return found

    @property
    def gaps(self) -> list[str]:
        """Returns a line for each reason for which rows, or their accuracy, could not be compared.

        Those of which a regression tells are left out.
        """
        rows = [("Not", it.obstacle, it.name) for it in self.rows if not it.regressions]
        rows += [("Accuracy not", it.obstacle_to_accuracy, it.name) for it in self.rows]
        gaps: dict[str, list[str]] = {}
        for what, why, name in rows:
            if why:
                gaps.setdefault(f"{what} compared ({why})", []).append(name)
        return [f"{gap}: {', '.join(names)}" for gap, names in gaps.items()]


def compare(
    before: Sweep,
    after: Sweep,
    *,
    tolerance: float | None = None,
    names: tuple[str, str] | None = None,
    **parts: float | None,
) -> Comparison:
    """Compares the rows of two sweeps by name; `names` are those of the sweeps, best their folders.

    A row got slower if the median of its steps rose by more than the part `slower`. The quartiles have no say
    in it, or a noisy machine would let every slowdown pass; where those of both sweeps overlap, the sentence
    says so. On a quiet machine medians of 100 steps repeat to one or two percent; on the shared machines that
    CI runs on, to ten or twenty, so give more there. It got less accurate if the loss or a metric is worse by
    more than `tolerance` spreads (None: as many as `before` was judged by), or if it diverged. Memory counts
    if `more_memory` says which part more is allowed. A quantity that only `before` has is missing.
    A row that fails is a regression also if it failed before, or is new. So are two sweeps in which nothing
    can be compared. `gaps` name the rows that could not be, `notes` other settings and environments.

    Raises AmpValueError for a limit that is negative or not finite, and for sweeps of another script (by the
    name of its file: another checkout has another folder), or with other arguments, steps or ranks.
    """
    refuse_other_training(before.settings, after.settings)
    defaults = {it.limit.option: it.limit.default for it in LIMITED}
    limits = Limits(before.settings.tolerance if tolerance is None else tolerance, defaults | parts)
    rows = dict.fromkeys(row.name for row in (*before.rows, *after.rows))
    changes = tuple(compare_row(row, before, after, limits) for row in rows)
    first, second = names or ("", "")
    sides = (write_side(first, before.environment), write_side(second, after.environment))
    return Comparison(changes, tuple(differences(before, after)), limits, sides)


def refuse_other_training(before: Settings, after: Settings) -> None:
    """Raises AmpValueError if the two sweeps trained something else, or for longer: neither got worse."""
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in TRAINING]
    others = [
        f"{name} {in_words(old)} before, {in_words(new)} after"
        for name, old, new in pairs
        if (PurePath(old).name != PurePath(new).name if name == "script" else old != new)
    ]
    if others:
        raise AmpValueError(
            f"the two sweeps trained different things, which cannot be compared: {'; '.join(others)}: "
            "expected the same script with the same arguments"
        )


def write_side(name: str, environment: Environment) -> str:
    """Says which sweep it is: its name, when it was made, of which commit, by which command."""
    it = environment.commit or ""
    commit = it and f"commit {it[:10]}{'+' if it.endswith('+') else ''}"
    parts = (name, environment.created, commit, environment.command)
    return ", ".join(part for part in parts if part)


def compare_row(name: str, before: Sweep, after: Sweep, limits: Limits) -> RowChange:
    """Compares the rows of a name."""
    old, new = before.row(name), after.row(name)
    runs = finished(runs_of(after.records, name)), finished(runs_of(before.records, name))
    return RowChange(name, old, new, *distances(*runs), limits)


def differences(before: Sweep, after: Sweep) -> Iterator[str]:
    """Yields a line for each thing besides the results in which the sweeps differ."""
    pairs = [(name, before.settings, after.settings) for name in SETTINGS]
    pairs += [(name, before.environment, after.environment) for name in ENVIRONMENT]
    for name, old, new in pairs:
        first, second = getattr(old, name), getattr(new, name)
        if first != second:
            yield f"{name}: {in_words(first)} before, {in_words(second)} after"


def in_words(value: object) -> str:
    """Writes a setting or a fact about a machine.

    >>> in_words(("--epochs", "3")), in_words(None), in_words("cpu")
    ('--epochs 3', 'none', 'cpu')
    """
    if isinstance(value, tuple):
        return shlex.join(value) or "none"
    return "none" if value is None else str(value)
