"""What state the gradients of an optimizer are in, from one event of training to the next."""

from __future__ import annotations

import enum
from typing import Protocol


class Phase(enum.Enum):
    """By what the gradients of an optimizer are multiplied, and who takes that off again.

    | phase    | a block begins    | ends     | delays  | names others | plain backward | is read | a step   |
    |----------|-------------------|----------|---------|--------------|----------------|---------|----------|
    | UNSCALED | sets aside        | UNSCALED | DELAYED | UNSCALED     | adds           | true    | uses     |
    | DELAYED  | UNSCALED, or adds | UNSCALED | DELAYED | DELAYED      | UNSCALED, adds | scaled  | UNSCALED |
    | LOCAL    | LOCAL             | UNSCALED | LOCAL   | LOCAL        | READ, adds     | READ    | UNSCALED |
    | READ     | LOCAL             |          |         | LOCAL        | adds, UNSCALED | true    | UNSCALED |

    A phase in a cell is the one that follows; what was scaled is unscaled on the way to UNSCALED. A block
    at the scale that is held adds to what is there. Another one settles what is DELAYED, or, where it does
    not name the optimizer, brings its own to the scale that is held; LOCAL ones it brings to its scale. A
    plain backward whose gradients ranks average settles what is READ.
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
