"""What is known about a run when it is over."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    NO_STEPS = "no steps"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a child measured about itself; None where there was nothing to measure.

    `step_ms` is a median over the steps after the warm-up, `final_loss` the mean of the last
    losses, `loss_scale` the last one (of several scalers the smallest). `memory` says which memory
    `peak_mib` is, "resident" or "device". `metrics` holds the last value of each metric.
    """

    initialized: bool
    steps: int
    skipped_steps: int
    step_ms: float | None
    memory: str
    peak_mib: float | None
    final_loss: float | None
    loss_scale: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Record:
    """One run: how it ended, how long it took, and what the child measured if it got that far."""

    name: str
    outcome: Outcome
    seconds: float
    cause: str
    log: str
    measured: Measured | None

    @property
    def failed(self) -> bool:
        """Says whether the run has nothing to compare."""
        return self.outcome is not Outcome.FINISHED

    @property
    def accuracy(self) -> float | None:
        """Returns the accuracy that the script reported last."""
        return self.measured.metrics.get("accuracy") if self.measured else None

    def to_json(self) -> str:
        """Writes the record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        measured = fields["measured"] and Measured(**fields["measured"])
        return cls(**fields | {"outcome": Outcome(fields["outcome"]), "measured": measured})
