"""How tools watch a run: an observer is told what happens in a session."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from ampatch.policy import Policy


class Observer:
    """Is told what happens; tools override the methods they need.

    The methods run inside the training loop. None of them may change tensors, and one that reads
    a value from the device costs the loop a host sync.
    """

    def on_initialize(self, policy: Policy) -> None:
        """Called when `initialize` has set up a call that is enabled."""

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Called when a block of `scale_loss` begins; `loss` is detached and not scaled."""

    def on_step(self, optimizer: Optimizer) -> None:
        """Called after each step of an initialized optimizer, skipped or not."""

    def on_report(self, metrics: dict[str, object]) -> None:
        """Called with what the script gave to `report`."""

    def on_uninitialize(self) -> None:
        """Called before a session is undone."""
