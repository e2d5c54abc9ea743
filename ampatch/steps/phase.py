"""What state the gradients of an optimizer are in, from one event of training to the next."""

from __future__ import annotations

import enum
from typing import Protocol


class Phase(enum.Enum):
    """By what the gradients of an optimizer are multiplied, and who takes that off again.

    | phase    | a block begins        | a block ends | one delays | a plain backward | a reader | a step  |
    |----------|-----------------------|--------------|------------|------------------|----------|---------|
    | UNSCALED | earlier ones go aside | UNSCALED     | DELAYED    | adds             | reads    | uses    |
    | DELAYED  | UNSCALED, or adds     | UNSCALED     | DELAYED    | UNSCALED, adds   | scaled   | UNSCALED|
    | LOCAL    | UNSCALED, or adds     | UNSCALED     | LOCAL      | adds             | READ     | UNSCALED|
    | READ     | LOCAL                 |              |            | adds             | reads    | UNSCALED|

    A phase in a cell is the one that follows; what was scaled is unscaled on the way to UNSCALED. A block
    at the scale that is held adds to what is there, and any other settles it first.
    """

    UNSCALED = enum.auto()
    """True gradients, or none."""
    DELAYED = enum.auto()
    """Scaled until a later block, or the step, unscales them (`delay_unscale`)."""
    LOCAL = enum.auto()
    """Scaled, and not averaged over ranks yet: the backward that averages them adds to them in place."""
    READ = enum.auto()
    """LOCAL ones, unscaled for who reads them: the next block scales them again, and goes on."""


class OpenBlock(Protocol):
    """What an optimizer knows of a block of `scale_loss` that is open, beside its own phase."""

    def end_early(self, *, by_step: bool = True) -> None:
        """Ends it at a step inside it, or at `uninitialize`."""

    def release(self, optimizer: object = None) -> bool:
        """Lets optimizers go that it does not name; returns whether this was one of them."""
