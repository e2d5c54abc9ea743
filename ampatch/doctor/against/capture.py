"""Captures in a run what modules give and what gradients arrive, at one attempt at a step.

The weights stay as they were at first: steps are made with no gradients. So two runs of a script, at two
levels, can be compared number by number, at the same weights and on the same batches.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.doctor.instruments.clock import Clock, Instrument, parameters_of
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.values import drop_alike, is_finite, plain, quiet, tensors_in

SAMPLES = 2**16  # numbers of a tensor, at most
LAST = 24  # the attempt after which a scale is not waited for: it has fallen from 2**24 to 1

# What is captured: phase, model, module, which call of it, and a parameter or the number of an output.
Key = tuple[str, str, str, int, str]


class Capture(Instrument):
    """Captures the first attempt whose gradients are finite, or whose forward is not, or the `wanted` one.

    It holds the weights: steps change nothing.
    """

    def __init__(self, clock: Clock, wanted: int | None) -> None:
        super().__init__(clock)
        self._wanted, self.attempt = wanted, 0
        self.tensors: dict[Key, Tensor] = {}
        self._is_good, self._is_over, self._is_curable = True, False, True
        self._last: Tensor | None = None
        self._names: list[str] = []  # of models
        clock.undo.callback(register_optimizer_step_pre_hook(hold_weights).remove)
        clock.wrap(F, "dropout", drop_alike)

    def enter_model(self, model: Module, args: tuple) -> None:
        """Learns what the models are called."""
        if len(self.clock.models.roots) > len(self._names):
            self._names.append(self.clock.models.place.model)

    def see_output(self, module: Module, output: object) -> None:
        """Takes an output, and its gradient when it comes, but for what an inner module gave."""
        place = self.clock.models.place
        if place is None or not torch.is_grad_enabled():
            return
        with quiet():
            for number, tensor in enumerate(tensors_in(output)):
                if tensor is self._last or not tensor.is_floating_point():
                    continue
                self._last = tensor
                key = (place.model, place.module, place.call, str(number))
                self._take(("forward", *key), tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._take, ("backward", *key)))

    def _take(self, key: Key, tensor: Tensor) -> None:
        if self._is_over:
            self.tensors.clear()
            self._is_good, self._is_over, self.attempt = True, False, self.attempt + 1
        with quiet():
            self._is_curable &= key[0] == "backward" or is_finite(tensor)
            self.tensors.setdefault(key, sample(tensor))

    def end_backward(self) -> None:
        """Takes the gradients of parameters, the last layer's first."""
        for model, root in zip(self._names, self.clock.models.roots, strict=True):
            for name, parameter in reversed(list(root.named_parameters())):
                if parameter.grad is not None:
                    self._is_good &= is_finite(parameter.grad)
                    key = ("backward", model, name.rpartition(".")[0], 0, name)
                    self.tensors[key] = sample(parameter.grad)

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Ends the script where the attempt is the one; no other scale cures a forward that overflows."""
        is_one = self._is_good or not self._is_curable or self.attempt == LAST
        if is_one if self._wanted is None else self.attempt == self._wanted:
            raise Enough
        self._is_over, self._last = True, None

    def save(self, path: str) -> None:
        """Writes what was captured."""
        torch.save({"attempt": self.attempt, "tensors": self.tensors}, path)


def sample(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers on the processor, of a large one some at equal distances."""
    values = plain(tensor).flatten()
    return values[:: -(-values.numel() // SAMPLES) or 1].cpu().clone()


def hold_weights(optimizer: Optimizer, *_: object) -> None:
    """A hook before a step: without gradients it changes nothing."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None
