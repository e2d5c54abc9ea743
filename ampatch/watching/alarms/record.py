"""What is kept of a call, a loss and an optimizer whose scale is followed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from ampatch.levels.loss_scale import Alarms
from ampatch.steps.optimizer import InitializeCall
from ampatch.steps.scaler import BackwardOutcome, LossScaler
from ampatch.watching.alarms.history import Ring
from ampatch.watching.alarms.inputs import LastForward
from ampatch.watching.alarms.judge import Judge


@dataclass(slots=True, eq=False)
class FollowedCall:
    """A call of `initialize` that is followed: its limits, and the folder of its post-mortems."""

    call: InitializeCall
    limits: Alarms | None
    folder: Path | None
    post_mortems: int = 0  # that were written
    # The models, each with what its last forward was given.
    forwards: list[tuple[weakref.ref[Module], weakref.ref[LastForward]]] = field(default_factory=list)

    def live_forwards(self) -> list[tuple[Module, LastForward]]:
        """The models that are still there, each with what its last forward was given."""
        pairs = [(model(), forward()) for model, forward in self.forwards]
        return [(model, forward) for model, forward in pairs if model is not None and forward is not None]


@dataclass(slots=True, eq=False)
class SeenStep:
    """What is kept for one optimizer until its next step."""

    losses: dict[int, Tensor] = field(default_factory=dict)  # of blocks at static scales, by loss_id
    forwards: list[weakref.ref[LastForward]] = field(default_factory=list)  # of its models


@dataclass(slots=True, eq=False)
class FollowedLoss:
    """What is kept for one loss."""

    scaler: LossScaler
    call: FollowedCall
    ring: Ring
    judge: Judge | None
    begun: int = 0  # steps, including those that nobody has read
    last_alarm: int | None = None

    def is_calm(self) -> bool:
        """Whether a clean step at the scale of the one before would change nothing."""
        return self.judge is None or self.judge.is_calm

    def count_if_calm(self, outcomes: Sequence[BackwardOutcome]) -> bool:
        """Counts a step that was clean, at the scale of the one before; says whether it was one."""
        scale = self.ring.scale
        for outcome in outcomes:
            overflow, before, after = outcome.read()
            if overflow or before != scale or after != scale or not outcome.is_loss_finite:
                return False
        return self.count_clean(scale)

    def count_clean(self, scale: float) -> bool:
        """Counts a clean step, unless there is something to note or to judge; says whether it did."""
        is_calm = scale == self.ring.scale and self.is_calm()
        self.ring.steps += is_calm
        return is_calm
