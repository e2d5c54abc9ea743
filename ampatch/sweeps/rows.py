"""What a sweep consists of: a row for each run, a row for each level, and what is advised."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ampatch import OPT_LEVELS
from ampatch.sweeps import numbers

AUTOCAST = "autocast"
BASELINE = "O0"
LEVELS = (*OPT_LEVELS, AUTOCAST)
# O6 needs a package and a GPU that few have: who has them names it.
DEFAULT_LEVELS = tuple(name for name in LEVELS if name != "O6")
LAST_LOSSES = 10  # that the final loss is the mean of
WARMUP = 5  # steps of a run that are not timed
TOLERANCE = 2.0  # spreads of O0 within which a level is as accurate


class Word(str, Enum):
    """A word of a fixed set, which prints and is stored as itself (`enum.StrEnum`, of Python 3.11)."""

    __str__ = str.__str__
    __format__ = str.__format__


class Ending(Word):
    """How a run ended."""

    FINISHED = "finished"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    NO_STEPS = "no steps"
    CUT = "cut short"  # by the sweep: it was far slower than O0
    INTERRUPTED = "interrupted"


class Verdict(Word):
    """A judgement of a level's accuracy, compared with O0."""

    BASELINE = "baseline"
    SAME = "same"
    WORSE = "worse"
    SLOW = "slow"  # so much that its run was cut short
    UNSURE = "unsure"  # worse, by what chance may be: one seed cannot tell
    DIVERGED = "diverged"
    FAILED = "failed"
    UNKNOWN = "-"  # not compared


class Outcome(Word):
    """What a sweep comes to."""

    TAKE = "take"
    STAY = "stay"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over the steps, which count from 1; where many were averaged, the last step of them is named."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    """When a run trained: from its first step to its end, in nanoseconds since 1970, as files have them."""

    run: str
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run: which it was, how it ended, and what it measured; None, or nothing, where there was nothing.

    Times are milliseconds a step, without the warm-up: the median, and its quartiles over `timed` steps. A
    step ends where an optimizer steps that has stepped in it before: with one optimizer, at each of its
    steps. `skipped` are the steps that an overflow skipped. `memory` says which memory `peak_mib` is:
    "resident" or "device". Losses are kept by their `loss_id`, metrics by name. `first_loss` and
    `final_loss` are means of the first and the last losses, `loss_noise` the standard error of the latter,
    `start` some weights before the first step.

    Of what others took while it trained, `busy` is the part of the time of the processors that it may use, 0
    where enough was left; `waited` what the thread that waited most had none of them, though it wanted one;
    `throttled` what the limit of its cgroup stopped it. `processor_ms` is what all its threads had, a step.

    `began` and `ended` are nanoseconds since 1970. `read` is a file that the run `writer` wrote, `resumed`
    one from before the sweep that this run wrote as well. `uncast` says that torch.autocast cast nothing.
    """

    row: str
    seed: int = 0
    repeat: int = 0
    outcome: Ending = Ending.FINISHED
    seconds: float = 0.0
    cause: str = ""  # in a line, if it failed
    log: str = ""
    lines: tuple[str, ...] = ()  # the end of the log, if it failed
    ended: int = 0
    initialized: bool = False
    steps: int = 0
    skipped: tuple[int, ...] = ()
    step_ms: float | None = None
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    timed: int = 0
    memory: str = "resident"
    peak_mib: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    loss_noise: float | None = None
    loss_scale: float | None = None  # the last one, of several scalers the smallest
    losses: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    start: tuple[float, ...] = ()
    busy: float | None = None
    waited: float | None = None
    throttled: float | None = None
    processor_ms: float | None = None
    began: int | None = None
    read: str = ""
    writer: str = ""
    resumed: str = ""
    uncast: bool = False
    device: str = "cpu"
    threads: int = 1

    @property
    def failed(self) -> bool:
        """Says whether the run has no times to compare."""
        return self.outcome not in (Ending.FINISHED, Ending.CUT)

    @property
    def name(self) -> str:
        return f"{self.row} seed {self.seed}" + (f" repeat {self.repeat}" if self.repeat else "")

    @property
    def training(self) -> Training:
        """Returns when it trained; of a run that left nothing behind, all of its time counts."""
        began = self.began if self.initialized else self.ended - int(self.seconds * 1e9)
        return Training(self.name, self.ended if began is None else began, self.ended)

    @property
    def lost(self) -> tuple[float, str]:
        """Returns the part of its time that the run lost to others, and how: the name of the field.

        How busy the processors were tells less than what the run waited itself, where that is known.
        """
        if self.waited is None:
            return self.busy or 0.0, "busy"
        return max((self.waited, "waited"), (self.throttled or 0.0, "throttled"))

    def last(self, metric: str) -> float | None:
        """Returns the last value of a metric, None if it was never reported."""
        curve = self.metrics.get(metric)
        return curve.values[-1] if curve and curve.values else None


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is from that of O0: the level's mean over seeds, O0's, and their distance in spreads.

    `spreads` is positive where the level is better; None without O0. `spread` is its unit, and `unit` says
    what that is: "seeds" (standard deviation of O0 over the seeds); with one seed what the runs themselves
    show, "steps" (standard error of the last losses, or deviation of the last values) or "runs" (what
    autocast, or a repeat of O0, moved the value); or "percent", a part of O0's value, where nothing is
    known. `doubt` is what chance may be with one seed, in spreads.
    """

    value: float | None
    baseline: float | None
    spreads: float | None
    spread: float | None
    unit: str
    doubt: float = 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """One line of the table: what the runs of a level or variant came to.

    Times and memory are medians over the runs that finished under the conditions of O0; `speed` and `memory`
    are ratios to O0 (above 1: faster; below 1: less). If there are no such runs, `disturbed` says what was
    different: there is no `speed` then, and the times are of all runs.
    """

    name: str
    runs: int
    failed: int
    outcome: Ending  # FINISHED if any run did
    verdict: Verdict
    reason: str  # of the verdict, in a few words, where there is one to give
    note: str  # what else is to be known of its runs
    loss: Distance
    metrics: Mapping[str, Distance]
    step_ms: float | None
    step_ms_low: float | None
    step_ms_high: float | None
    timed: int
    speed: float | None
    peak_mib: float | None
    memory: float | None
    skipped: float | None  # steps, on average in a run
    loss_scale: float | None
    disturbed: str = ""

    @property
    def is_autocast(self) -> bool:
        return self.name.split()[:1] == [AUTOCAST]

    def describe(self, width: int = 0) -> str:
        """Writes the level in a line; its name takes so many characters."""
        parts = [self.name.ljust(width)]
        if self.step_ms is not None:
            parts.append(f"{numbers.number(self.step_ms)} ms a step")
        if self.speed is not None:
            parts.append(numbers.ratio(self.speed))
        values = [("loss", self.loss), *self.metrics.items()]
        parts += [
            f"{name} {numbers.short(distance.value)}"
            for name, distance in values
            if distance.value is not None
        ]
        return "  ".join([*parts, ": ".join(filter(None, (self.verdict, self.reason)))])


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a sweep; `rows` are its levels and variants, `arguments` the script's own.

    With `isolate` each run had a copy of the working directory. `in_full` are sweeps whose rows were named by
    their user, of which no run is cut short. `digest` tells the script's text from others.
    """

    script: str
    arguments: tuple[str, ...]
    rows: tuple[str, ...]
    seeds: int = 1
    repeat: int = 1
    steps: int | None = None
    timeout: float | None = None
    nproc_per_node: int | None = None
    isolate: bool = False
    in_full: bool = False
    digest: str = ""

    @property
    def runs(self) -> int:
        return len(self.rows) * self.seeds * self.repeat


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a sweep ran: versions, machine, command and commit, as text or numbers by name."""

    created: str  # ISO 8601, with the time zone
    command: str
    ampatch: str
    torch: str
    python: str
    platform: str
    cpu: str
    cores: int
    threads: int
    device: str  # "cpu", or the GPU's name
    half: str | None = None  # the CPU's instructions for half types, None where that is not known

    @property
    def has_bfloat16(self) -> bool:
        """Says whether products in bfloat16 may be faster; where it is not known, they may."""
        return self.device != "cpu" or self.half is None or "bf16" in self.half


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do: take `row`, stay with O0, or find out what cannot be told; the reason says how."""

    outcome: Outcome
    row: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Everything about a sweep; `rows` and `recommendation` follow from the `records`, a row for each run."""

    settings: Settings
    environment: Environment
    records: tuple[Run, ...] = field(repr=False)
    rows: tuple[Level, ...]
    recommendation: Recommendation

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        return "\n".join([*(row.describe(width) for row in self.rows), self.recommendation.reason])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def find_level(rows: Iterable[Level], name: str | None = BASELINE) -> Level | None:
    return next((row for row in rows if row.name == name), None)


def finished(runs: Iterable[Run], row: str | None = None) -> list[Run]:
    return [run for run in runs if run.outcome is Ending.FINISHED and row in (None, run.row)]


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
    return re.sub("|".join(map(re.escape, variants)), lambda match: keys[match[0]], text)


def metric_names(rows: Sequence[Level], runs: Iterable[Run]) -> list[str]:
    """Returns the names of all metrics of levels and runs, in the order in which they come."""
    names = [name for row in rows for name in row.metrics]
    return list(dict.fromkeys(names + [name for run in runs for name in run.metrics]))
