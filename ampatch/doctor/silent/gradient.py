"""What is known of gradients and losses while a loss scale is on its way."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp import GradScaler


@dataclass(slots=True)
class Gradient:
    """What a gradient is made of, since it was made or zeroed.

    `scaler` is set while some of it is scaled; `raw` is the line of a backward pass without a scale;
    `was_unscaled` says that some of it has been divided by a scale, `stepped` is the version that a step has
    used, and `is_old` says that a backward pass has added to that.
    """

    scaler: GradScaler | None = None
    raw: str | None = None
    was_unscaled: bool = False
    stepped: int | None = None
    is_old: bool = False


@dataclass(slots=True)
class ScaledLoss:
    """A loss that a scaler has scaled: the node of the graph that did, and whether a backward reached it."""

    scaler: GradScaler
    node: object
    where: str | None
    attempt: int
    is_finite: bool
    was_used: bool = False
