"""A run when it is over: how it ended, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

LAST_LOSSES = 10  # that the final loss is the mean of


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
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the values of a sample lie: the median, the quartiles around it, and how many there are."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over the steps, which count from 1; where many were averaged, the last step of them is named."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of the tensors that training keeps, looked at once, before a step of an optimizer.

    `parameters` are the model's own, `casts` the copies of weights that O1 and O4 keep for a step.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer_state: int
    casts: int


@dataclass(frozen=True, slots=True)
class CastRate:
    """Casts of patched functions' arguments, on average in a step: `made`, and `reused` casts of weights."""

    made: float
    reused: float


@dataclass(frozen=True, slots=True)
class Waits:
    """What other programs took from a run while it trained, in parts of its time; None where nobody counts.

    `busy` is the part of the time of the processors that it may use, 0 where enough was left; `waited` what
    the thread that waited most had none of them, though it wanted one; `throttled` what the limit of its
    cgroup stopped it. `forced` are switches to other programs that it did not want, a second, and
    `processor_ms` what all its threads had of the processors, a step.
    """

    busy: float | None = None
    waited: float | None = None
    throttled: float | None = None
    forced: float = 0.0
    processor_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """When a run trained: from its first step to its end, in nanoseconds since 1970, as files have them."""

    run: str
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class FilesRead:
    """What a run read: a file that the earlier run `writer` wrote, or one from before that it wrote itself."""

    file: str = ""
    writer: str = ""
    resumed: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run; None, or nothing, where there was nothing to measure.

    A step ends where an optimizer steps that has stepped in it before: with one optimizer, at each of its
    steps. Times are milliseconds a step, without the warm-up, `forward_ms` of the models alone; `samples` are
    those a step. `skipped` are the steps that an overflow skipped. `memory` says which memory `peak_mib` is:
    "resident" or "device". Losses are kept by their `loss_id`, loss scales by the number of their scaler
    (where they changed), metrics by name. `first_loss` and `final_loss` are means of the first and the last
    losses, `loss_noise` the standard error of the latter, `start` some weights before the first step, and
    `began` when that was, in nanoseconds. `read` says what it read that a run wrote. `uncast` says of the
    yardstick that torch.autocast cast nothing.
    """

    initialized: bool = False
    steps: int = 0
    skipped: tuple[int, ...] = ()
    step_ms: Spread | None = None
    forward_ms: Spread | None = None
    backward_ms: Spread | None = None
    update_ms: Spread | None = None
    samples: float | None = None
    memory: str = "resident"
    peak_mib: float | None = None
    bytes: Bytes | None = None
    casts: CastRate | None = None
    losses: dict[str, Curve] = field(default_factory=dict)
    first_loss: float | None = None
    final_loss: float | None = None
    loss_noise: float | None = None
    loss_scales: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    start: tuple[float, ...] = ()
    waits: Waits | None = None
    began: int | None = None
    read: FilesRead | None = None
    uncast: bool = False
    device: str = "cpu"
    threads: int = 1

    @property
    def loss_scale(self) -> float | None:
        """Returns the last loss scale, of several scalers the smallest."""
        return min((curve.values[-1] for curve in self.loss_scales.values() if curve.values), default=None)

    def final(self, metric: str) -> float | None:
        """Returns the last value of a metric, None if it was never reported."""
        curve = self.metrics.get(metric)
        return curve.values[-1] if curve and curve.values else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: of which row, with which seed, how it ended, how long it took, and what was measured.

    `busy` is the part of the processors' time that other programs took meanwhile, 0 where enough was
    left, None where that is not known. `log` is the file that took the script's output. If the run failed,
    `cause` says in one line why, and `last_lines` are the end of the log. `printed` is a metric that the log
    ends with: its name, and the words that are there. `ended` is when, in nanoseconds.
    """

    row: str
    seed: int
    repeat: int
    outcome: Ending
    seconds: float
    cause: str = ""
    last_lines: tuple[str, ...] = ()
    log: str = ""
    measured: Measured | None = None
    busy: float | None = None
    printed: tuple[str, ...] = ()
    ended: int = 0

    @property
    def name(self) -> str:
        """Names the run among those of its sweep."""
        return f"{self.row} seed {self.seed}" + (f" repeat {self.repeat}" if self.repeat else "")

    @property
    def training(self) -> Training:
        """Returns when it trained; of a run that left nothing behind, all of its time counts."""
        began = self.measured.began if self.measured else self.ended - int(self.seconds * 1e9)
        return Training(self.name, self.ended if began is None else began, self.ended)

    @property
    def failed(self) -> bool:
        """Says whether the run has nothing to compare."""
        return self.outcome is not Ending.FINISHED

    @property
    def lost(self) -> tuple[float, str]:
        """Returns the part of its time that the run lost to others, and how: the name of a field of `Waits`.

        How busy the processors were tells less than what the run waited itself, where that is known.
        """
        waits = self.measured.waits if self.measured else None
        if waits is None or waits.waited is None:
            return self.busy or 0.0, "busy"
        return max((waits.waited, "waited"), (waits.throttled or 0.0, "throttled"))
