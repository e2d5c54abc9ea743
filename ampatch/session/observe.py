"""How tools watch a run: an observer is told what happens in a session."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.levels.policy import Policy


class Observer:
    """Gets told what happens; tools override the methods they need.

    The methods run inside the training loop. None of them may change tensors, and one that reads
    a value from the device costs the loop a host sync. `loss_id` is numbered across calls of
    `initialize`, as in `state_dict`.
    """

    counts_casts = False
    """Whether `cast_counts` is wanted in sessions that open while this watches; costs 0.2 µs a cast."""

    def on_initialize(self, policy: Policy) -> None:
        """Called when `initialize` has set up a call that is enabled."""

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Called after `on_initialize` with what the call was given."""

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Called when a block of `scale_loss` begins; `loss` is detached and not scaled."""

    def on_backward(self, loss_id: int) -> None:
        """Called when such a block has ended without an exception."""

    def on_step_begin(self, optimizer: Optimizer) -> None:
        """Called before a step of an initialized optimizer does anything."""

    def on_step(self, optimizer: Optimizer) -> None:
        """Called after each step of an initialized optimizer, skipped or not."""

    def on_report(self, metrics: dict[str, object]) -> None:
        """Called with what the script passed to `report`."""

    def on_uninitialize(self) -> None:
        """Called before a session is undone."""
