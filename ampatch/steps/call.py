"""One call of `initialize`: what is left of it while a session is open."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ampatch.levels.policy import Policy
from ampatch.steps.scaler import LossScaler


@dataclass(slots=True, eq=False)
class Call:
    """What is left of one call of `initialize`; each optimizer belongs to the call that took it.

    The scalers stay, whatever becomes of models and optimizers: `state_dict` numbers them on.
    """

    policy: Policy
    verbosity: int
    scalers: Sequence[LossScaler]
    undo: ExitStack = field(default_factory=ExitStack)  # what was done to the models and the optimizers
    members: list[weakref.ref] = field(default_factory=list)  # these, to see whether any is left

    def forget_dropped(self) -> None:
        """Forgets the undo once there is nothing left that it would undo."""
        if all(reference() is None for reference in self.members):
            self.undo.pop_all()
            self.members.clear()

    def close(self) -> None:
        """Undoes it on what is alive, which stays so until the end: some of it lives on our own hooks."""
        with self.undo:  # even if Ctrl-C ends what follows
            alive = [reference() for reference in self.members]
        alive.clear()
