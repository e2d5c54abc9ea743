"""What the precision plugins for Lightning do, whichever of its two packages a script imports."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ampatch as amp
from ampatch.integrations.common import validate, was_skipped


class PrecisionMethods:
    """The methods of a precision plugin; its arguments are those of `amp.initialize`."""

    def __init__(self, **options: object) -> None:
        self.options = validate(options)

    def connect(
        self, model: Module, optimizers: list[Optimizer], schedulers: Sequence[object]
    ) -> tuple[object, ...]:
        """Initializes them where a `fit` begins, after the session of an earlier one has ended."""
        module = model.module if isinstance(model, DistributedDataParallel) else model
        if optimizers and module.trainer.state.fn == "fit":  # `validate` and `test` find those of a fit
            amp.uninitialize()
            amp.initialize(module, optimizers, **self.options)
            for each in schedulers:
                hold_back(each.scheduler, each.interval)
        return model, optimizers, schedulers

    def backward(
        self, tensor: Tensor, model: Module, optimizer: object, *args: object, **kwargs: object
    ) -> None:
        """Scales the loss, runs its backward pass and unscales the gradients."""
        stepped = toggled(model.trainer.optimizers) if optimizer is None else nullcontext([optimizer])
        with stepped as optimizers, amp.scale_loss(tensor, optimizers) as scaled_loss:
            super().backward(scaled_loss, model, optimizer, *args, **kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        return amp.master_params(optimizer)

    def state_dict(self) -> dict[str, dict[str, float | int]]:
        """Returns the loss scale for a checkpoint; nothing before the first `fit`."""
        try:
            return amp.state_dict()
        except amp.NotInitializedError:
            return {}

    def load_state_dict(self, state_dict: dict[str, dict[str, float | int]]) -> None:
        """Restores the loss scale, where there is one: `validate` and `test` need none."""
        if self.state_dict():
            amp.load_state_dict(state_dict)


class HeldBack:
    """What a scheduler does otherwise that follows steps: nothing where an overflow skipped the last one."""

    def step(self, *args: object, **kwargs: object) -> None:
        if not was_skipped(self.optimizer):
            super().step(*args, **kwargs)


def hold_back(scheduler: object, interval: str) -> None:
    """Has a scheduler that goes from step to step count the steps that were made, and no others."""
    if interval == "step" and hasattr(scheduler, "optimizer") and not isinstance(scheduler, HeldBack):
        kind = type(scheduler)
        scheduler.__class__ = type(kind.__name__, (HeldBack, kind), {})


@contextmanager
def toggled(optimizers: Sequence[Optimizer]) -> Iterator[list[Optimizer]]:
    """Yields those that manual optimization has toggled, and keeps gradients from the others.

    Lightning toggles what an optimizer steps, which at O2 and O5 are masters: their parameters follow here.
    """
    pairs = [pair for optimizer in optimizers for pair in amp.master_pairs(optimizer)]
    halves = [half for half, master in pairs if half.requires_grad and not master.requires_grad]
    for half in halves:
        half.requires_grad_(False)
    try:
        yield [one for one in optimizers if any(param.requires_grad for param in amp.master_params(one))]
    finally:
        for half in halves:
            half.requires_grad_(True)
