"""What blocks and steps in a CUDA graph note outside of the device: each replay of the graph repeats it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim import Optimizer

from ampatch.errors import AmpError
from ampatch.levels.undo import weakly
from ampatch.steps.masters import MasterParams
from ampatch.steps.scaler import BackwardOutcome, LossScaler, Scale


class Capturable(Protocol):
    """What is read and written here of an `AmpOptimizer`."""

    optimizer: Optimizer
    masters: MasterParams
    pending: list[BackwardOutcome]
    last_outcomes: list[BackwardOutcome]
    scale: Scale | None
    capture: object
    from_before: set[int]

    def hold(self, scale: Scale | None) -> None:
        """Notes what the gradients are multiplied by until they are settled."""

    def repeat_step(self) -> None:
        """Notes that a step ran in a CUDA graph that was replayed."""


class CapturedGrads:
    """The gradients that a block made in the memory of a graph, of one optimizer's parameters and masters."""

    def __init__(self, amp: Capturable) -> None:
        self.find_optimizer = weakref.ref(amp)
        params = [param for param in amp.masters.stepped_params() if id(param) not in amp.from_before]
        self._grads = [(param, param.grad) for param in params if param.grad is not None]

    def forget(self, amp: Capturable) -> None:
        """Leaves gradients of an optimizer to the graph, which holds its step as well."""
        if self.find_optimizer() is amp:
            self._grads = []

    @torch.no_grad()
    def attach(self) -> None:
        """Lets parameters and masters have them again: a step, or `zero_grad`, has taken them away."""
        for param, grad in self._grads:
            if param.grad is None:
                param.grad = grad
            elif param.grad is not grad:  # what the parameter has got since the last replay
                param.grad.add_(grad)


@dataclass(slots=True, eq=False)
class CapturedBlock:
    """Repeats what a block of `scale_loss` noted; called after each replay."""

    grads: Sequence[CapturedGrads]
    outcome: BackwardOutcome | None
    scaler: LossScaler
    delayed: Scale | None = None
    update: bool = True

    def __call__(self) -> None:
        outcome = self.outcome and self.scaler.repeat(self.outcome, update=self.update)
        delayed = self.delayed and self.delayed.copy()
        for grads in self.grads:
            amp = grads.find_optimizer()
            if amp is not None:
                grads.attach()
                enter_capture(amp, None)
                amp.capture = None
                amp.hold(delayed)
                amp.pending += [] if outcome is None else [outcome]


def enter_capture(amp: Capturable, capture: object, is_step: bool = False) -> None:
    """Tells what is captured in a CUDA graph from what is not, of which a graph can know nothing."""
    if capture is None:  # nobody has computed what a capture left: replays will
        amp.pending = [outcome for outcome in amp.pending if outcome.capture is None]
        if amp.scale is not None and amp.scale.capture is not None:
            amp.hold(None)
    elif capture is not amp.capture:
        waits = is_step and (amp.pending or amp.scale is not None)
        if waits or any(pair.master.grad is not None for pair in amp.masters):
            raise AmpError(
                f"{type(amp.optimizer).__name__}: a block of scale_loss before this CUDA graph waits "
                f"for its step, which replays would not see: step or call zero_grad() before the "
                f"capture, and capture scale_loss together with step()"
            )


def capture_step(amp: Capturable, capture: list[Callable[[], None]]) -> None:
    """Has replays note a step; gradients of blocks before it in the `capture` are left to the graph."""
    amp.last_outcomes = []  # nothing was computed: replays will
    blocks = [one for one in capture if isinstance(one, CapturedBlock)]
    for grads in [grads for block in blocks for grads in block.grads]:
        grads.forget(amp)
    capture.append(weakly(type(amp.masters).repeat_step, amp.masters))
    capture.append(weakly(type(amp).repeat_step, amp))
