"""What one backward pass did, as numbers that stay on the device until somebody asks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampatch.errors import AmpError


class BackwardOutcome:
    """What one backward pass did: whether it overflowed, the scale before and after, and the loss.

    Lives on the device as four numbers. `read` costs one host sync, once;
    `poll` costs none, and knows the answer once the device has delivered it.
    """

    def __init__(
        self, loss_id: int, numbers: Tensor, capture: object = None, *, knows_loss: bool = True
    ) -> None:
        self.loss_id = loss_id
        self.numbers = numbers  # found_inf, the scale before and after, the loss
        self.capture = capture  # the capture of a CUDA graph that it is part of
        self._knows_loss = knows_loss
        self._host: Tensor | None = None
        self._delivered: torch.cuda.Event | None = None
        self._values: tuple[bool, float, float] | None = None
        self._loss = 0.0
        self.is_noted = False  # whether it is in the history of its loss

    def copy(self) -> BackwardOutcome:
        """Returns what the numbers are now: the replay of a CUDA graph writes others into their memory."""
        return BackwardOutcome(self.loss_id, self.numbers.clone(), knows_loss=self._knows_loss)

    @property
    def found_inf(self) -> Tensor:
        """1 after an overflow, else 0, on the device."""
        return self.numbers[0]

    @property
    def is_loss_finite(self) -> bool | None:
        """Whether the loss itself was neither inf nor NaN, None if unchecked; may wait for the device."""
        self.read()
        return math.isfinite(self._loss) if self._knows_loss else None

    def is_known(self) -> bool:
        """Whether the host knows the numbers; of those on a GPU this asks for them, and does not wait."""
        return self._values is not None or (self.numbers.is_cuda and self.poll() is not None)

    def is_clean(self) -> bool:
        """Whether the host knows that there was no overflow, and no bad loss; never waits."""
        values = self._values
        if values is None:
            return self.is_known() and self.is_clean()
        return not values[0] and (not self._knows_loss or math.isfinite(self._loss))

    def forgive(self) -> None:
        """Counts as clean from now on: somebody else looks after the overflow."""
        self.found_inf.zero_()
        self._set(self.numbers.tolist())

    def read(self) -> tuple[bool, float, float]:
        """Returns (overflowed, scale before, after), waiting for the device if needed."""
        if self._values is None:
            self.read_all([self])
        return self._values

    def _set(self, numbers: list[float]) -> None:
        found_inf, before, after, self._loss = numbers
        self._values = (found_inf > 0, before, after)

    @staticmethod
    def read_all(outcomes: Iterable[BackwardOutcome]) -> bool:
        """Says whether any pass overflowed; one host sync for all of them together."""
        outcomes, unread = list(outcomes), []
        for outcome in outcomes:
            if outcome._values is None:
                unread.append(outcome)
        if unread:
            _fetch(unread)
        overflow = False
        for outcome in outcomes:  # no generator: this runs at each step
            overflow |= outcome._values[0]
        return overflow

    @staticmethod
    def combine(outcomes: Iterable[BackwardOutcome]) -> Tensor:
        """Returns 1 if any pass overflowed, else 0, on the device of the first."""
        # Fused kernels compare found_inf to 1, so that a sum of two overflows would go unnoticed.
        first, *others = [outcome.found_inf for outcome in outcomes]
        return functools.reduce(torch.maximum, [found.to(first.device) for found in others], first)

    def poll(self) -> tuple[bool, float, float] | None:
        """Returns what `read` does if it has reached the host, else None; never waits."""
        if self._values is not None or not self.numbers.is_cuda:
            return self.read()
        if self._delivered is None:
            # A default device of the script's must not decide, nor the device that is the current one.
            self._host = torch.empty(4, device="cpu", pin_memory=True)
            self._host.copy_(self.numbers, non_blocking=True)
            self._delivered = torch.cuda.Event()
            self._delivered.record(torch.cuda.current_stream(self.numbers.device))
        if not self._delivered.query():
            return None
        self._set(self._host.tolist())
        return self._values


def _fetch(unread: Sequence[BackwardOutcome]) -> None:
    """Brings numbers to the host; one host sync for all of them together."""
    device, numbers = unread[0].numbers.device, []
    for outcome in unread:
        if outcome.capture is not None:
            raise AmpError(
                "whether a gradient overflowed cannot be read while a CUDA graph is captured: step with an "
                "optimizer that skips on the device (fused=True) and has stepped before, capture forward and "
                "backward alone and step outside of the graph, or use a static loss scale"
            )
        numbers.append(outcome.numbers.to(device))
    for outcome, row in zip(unread, torch.stack(numbers).tolist(), strict=True):
        outcome._set(row)
