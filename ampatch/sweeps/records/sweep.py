"""A sweep as a whole: what was run, where, every record, and what is made of them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ampatch import OPT_LEVELS
from ampatch.sweeps.records.record import Ending, Measured, RunRecord, Spread, Word
from ampatch.tools.numbers import ASCII

AUTOCAST = "autocast"
BASELINE = "O0"
LEVELS = (*OPT_LEVELS, AUTOCAST)


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a sweep; `rows` are its levels and variants, `arguments` the script's own.

    With a `budget`, in minutes, `repeat` is how often it came to be repeated. Runs went side by side on the
    `devices`, if there are any. With `isolate` each had a copy of the working directory. `digest` is that of
    the script's text.
    """

    script: str
    arguments: tuple[str, ...]
    rows: tuple[str, ...]
    seeds: int = 1
    repeat: int = 1
    budget: float | None = None
    steps: int | None = None
    warmup: int = 5
    timeout: float | None = None
    tolerance: float = 2.0
    nproc_per_node: int | None = None
    devices: tuple[str, ...] = ()
    isolate: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a sweep ran: versions, machine, command and commit, as text or numbers by name."""

    created: str  # ISO 8601, with the time zone
    command: str
    commit: str | None  # of the repository that the script is in; with "+" if it had changes
    ampatch: str
    torch: str
    python: str
    platform: str
    cpu: str
    cores: int
    threads: int
    device: str  # "cpu", or the GPU's name
    half: str | None = None  # the CPU's instructions for half types, None where that is not known


class Verdict(Word):
    """A judgement of a row's accuracy, compared with O0."""

    BASELINE = "baseline"
    SAME = "same"
    WORSE = "worse"
    DIVERGED = "diverged"
    FAILED = "failed"
    UNKNOWN = "-"  # there is no O0 to compare with, or nothing to compare


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is from that of O0: the row's mean over seeds, O0's, and their distance in spreads.

    `spreads` is positive where the row is better; None without O0. `spread` is its unit, and `unit` says what
    it is: "seeds" (standard deviation of O0 over the seeds), "steps" (standard error of O0's last losses,
    with one seed), or "percent" (a part of O0's value, where neither is known).
    """

    value: float | None
    baseline: float | None
    spreads: float | None
    spread: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One line of the table: what the runs of a level or variant came to.

    Times and memory are medians over the runs that finished under the conditions of O0, `spread` of the step
    from all of these; `speed` and `memory` are ratios to O0 (above 1: faster; below 1: less),
    `speed_to_fastest` to the fastest row. If there are none, `disturbed` says what was different: there is no
    `speed` then, and the times are of all runs.
    """

    name: str
    runs: int
    failed: int
    outcome: Ending  # FINISHED if any run did
    step_ms: Spread | None
    forward_ms: float | None
    backward_ms: float | None
    update_ms: float | None
    steps_per_second: float | None
    samples_per_second: float | None
    peak_mib: float | None
    skipped: float | None  # steps, on average in a run
    loss_scale: float | None
    loss: Distance
    metrics: Mapping[str, Distance]
    verdict: Verdict
    reason: str  # why it is "worse", "diverged" or "failed", in a few words
    speed: float | None = None
    speed_to_fastest: float | None = None
    memory: float | None = None
    memory_to_fastest: float | None = None
    disturbed: str = ""
    note: str = ""

    def describe(self, width: int = 0) -> str:
        """Writes the row in a line; its name takes so many characters."""
        parts = [self.name.ljust(width)]
        if self.step_ms is not None:
            parts.append(f"{ASCII.number(self.step_ms.median)} ms a step")
        if self.speed is not None:
            parts.append(ASCII.ratio(self.speed))
        values = [("loss", self.loss), *self.metrics.items()]
        parts += [f"{name} {ASCII.short(it.value)}" for name, it in values if it.value is not None]
        return "  ".join([*parts, ": ".join(filter(None, (self.verdict, self.reason)))])


def find_row(rows: Iterable[SweepRow], name: str | None = BASELINE) -> SweepRow | None:
    """Returns the row of a name, None if there is none."""
    return next((row for row in rows if row.name == name), None)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The row to take, None if none can be named, and the reason in a sentence."""

    row: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Everything about a sweep; `rows` and `recommendation` follow from the records."""

    settings: Settings
    environment: Environment
    records: tuple[RunRecord, ...] = field(repr=False)
    rows: tuple[SweepRow, ...]
    recommendation: Recommendation

    def row(self, name: str | None = BASELINE) -> SweepRow | None:
        """Returns the row of a name, None if there is none."""
        return find_row(self.rows, name)

    def measured(self, row: SweepRow) -> list[Measured]:
        """Returns what was measured in the runs of a row that finished, else in those that did not."""
        own = [it for it in self.records if it.row == row.name and it.measured]
        return [it.measured for it in own if not it.failed] or [it.measured for it in own]

    def __str__(self) -> str:
        """Writes a line a row, and the recommendation."""
        width = max((len(row.name) for row in self.rows), default=0)
        return "\n".join([*(row.describe(width) for row in self.rows), self.recommendation.reason])

    def _repr_html_(self) -> str:
        """Shows a notebook what `str` writes."""
        return f"<pre>{html.escape(str(self))}</pre>"


# ---- Short names of rows, for tables and charts: a level has its own, variants are V1, V2 and so on ----


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the short name of each row.

    >>> keys_of(["O1", "O2 loss_scale=128", "autocast", "autocast dtype=float16"])
    {'O1': 'O1', 'O2 loss_scale=128': 'V1', 'autocast': 'autocast', 'autocast dtype=float16': 'V2'}
    """
    names = list(dict.fromkeys(names))
    variants = [name for name in names if name not in LEVELS]
    return {name: name if name in LEVELS else f"V{variants.index(name) + 1}" for name in names}


def abbreviate(text: str, keys: Mapping[str, str]) -> str:
    """Puts the short names of variants in the place of their names.

    >>> abbreviate("O2 a=12 failed, O2 a=1 diverged", keys_of(["O2 a=1", "O2 a=12"]))
    'V2 failed, V1 diverged'
    """
    variants = sorted((name for name, key in keys.items() if name != key), key=len, reverse=True)
    if not variants:
        return text
    return re.sub("|".join(map(re.escape, variants)), lambda found: keys[found[0]], text)
