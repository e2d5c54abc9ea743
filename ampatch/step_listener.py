"""How an optimizer's steps are told to whom they concern."""

from __future__ import annotations

import sys
from types import FrameType


class StepListener:
    """Is told when an optimizer's step begins and ends; the session overrides these."""

    def capture(self) -> list | None:
        """Returns what collects what the replay of a CUDA graph must repeat, while one is captured."""
        return None

    def begin_step(self, optimizer: object) -> None:
        """Called before anything is done in a step."""

    def enter_step(self, frame: FrameType) -> None:
        """Called before the optimizer reads gradients, with the call that runs the step."""

    def exit_step(self, optimizer: object) -> None:
        """Called after the step, skipped or not."""

    def pause_step(self) -> FrameType:
        """Called before a closure runs inside a step; returns the call that runs the step."""
        return sys._getframe()
