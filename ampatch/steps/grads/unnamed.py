"""Scaled gradients of optimizers that no block names: seen as a backward makes them, unscaled when needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from weakref import ref

import torch
from torch import Tensor

from ampatch.errors import AmpError
from ampatch.steps.grads.plain import find_grads
from ampatch.steps.scaler import Scale

BeforeGrad = tuple[Tensor, "Tensor | None", int, bool]  # a parameter, its gradient, version, if scaled
LostGrad = tuple[Tensor, "ref[Tensor] | None"]  # a parameter, and what it has since its gradient was dropped
SeenGrad = tuple[Tensor, "ref[Tensor]"]  # a parameter, and the gradient that it has


class UnnamedGrads:
    """The gradients of one optimizer that are scaled, and that no block of `scale_loss` unscales.

    A block that names other optimizers makes them, and so does a backward of the scaled loss after its block.
    They are left as they are until somebody needs them, as nobody does in a GAN: `zero_grad` clears what the
    generator's loss left at the discriminator. Whatever a script does to them in place, they stay scaled, or
    are zero: any other backward settles what is there before it adds to it.
    """

    def __init__(self) -> None:
        self.scale: Scale | None = None  # of the last such backward; None where nothing is left
        self.looks = True  # whether somebody still wants to know of those
        self.used: list[SeenGrad] = []  # to which a backward of its own has added
        self._were_any: Tensor | None = None  # whether these were not zero before
        self.runs_in: int | None = None  # the thread of such a backward that runs
        self._scaled: list[SeenGrad] = []
        self._mixed: list[SeenGrad] = []  # scaled ones that were added to others
        self._unscaled: list[SeenGrad] = []  # for a reader
        self._lost: list[LostGrad] = []
        self._found_inf: Tensor | None = None  # of these

    @torch.no_grad()
    def begin_late(self, params: Iterable[Tensor], scale: Scale) -> None:
        """Scales gradients from before, since a late backward adds to them."""
        self.unscale()
        params = [param for param in params if param.grad is not None]
        for param in params:
            param.grad = scale.scale(param.grad)
        self.scale, self._scaled = scale, _see_grads(params)

    @torch.no_grad()
    def begin(self, params: Iterable[Tensor], scale: Scale) -> list[BeforeGrad]:
        """Returns what the gradients of parameters are before such a backward."""
        alive = _find_seen(self._scaled)
        if alive and self.scale is not scale:
            for param in alive:
                param.grad = scale.rescale(param.grad, self.scale)
            self.scale, self._scaled = scale, _see_grads(alive)
        scaled, self.runs_in = set(map(id, alive)), get_ident()
        return [
            (param, grad := param.grad, -1 if grad is None else grad._version, id(param) in scaled)
            for param in params
        ]

    def end(self, before: Sequence[BeforeGrad], scale: Scale) -> bool:
        """Notes which ones the backward has changed, and says whether it did; keeps none of them alive."""
        self.runs_in = None
        made = [
            (param, grad is None or is_scaled)
            for param, grad, version, is_scaled in before
            if param.grad is not None and (param.grad is not grad or param.grad._version != version)
        ]
        if made:
            changed = {id(param) for param, _ in made}
            self._scaled = [one for one in self._scaled if id(one[0]) not in changed]
            self._scaled += _see_grads(param for param, is_whole in made if is_whole)
            self._mixed += _see_grads(param for param, is_whole in made if not is_whole)
            self.scale = scale
        return bool(made)

    def check_step(self) -> None:
        """Raises AmpError for a step inside of such a backward, of gradients that it has not finished."""
        if self.runs_in == get_ident():
            raise AmpError(
                "scale_loss: an optimizer that the block does not name steps inside of its backward, where "
                "gradients are still scaled: step after the block, and name the optimizer in scale_loss"
            )

    def find_used(self) -> Tensor | None:
        """Whether the own gradients have some in them, on the device; None where none are left."""
        used, self.used = _find_seen(self.used), []
        return self._were_any if used else None

    def find(self) -> list[Tensor]:
        """The parameters that still have what was left there, edited or not."""
        return _find_seen((*self._scaled, *self._mixed, *self._unscaled))

    def find_lost(self) -> bool:
        """Whether a step lacks gradients that were dropped, since nobody has made others."""
        return any(param.grad is (find and find()) for param, find in self._lost)

    @torch.no_grad()
    def unscale(self) -> None:
        """Unscales what is still there, and drops what was added to others; no host sync."""
        for param in _find_seen(self._mixed):
            param.grad = None
            self._lost.append((param, None))
        params, self._scaled, self._mixed = _find_seen(self._scaled), [], []
        if not params:
            return
        if self._found_inf is None:
            self._found_inf = self.scale.scaler.new_found_inf()
        self.scale.unscale_(find_grads(params), self._found_inf)
        for param in params:  # so that another optimizer, which steps the parameter as well, knows it no more
            param.grad = param.grad.detach()
        self._unscaled += _see_grads(params)

    def settle(self, *, is_step: bool) -> Tensor | None:
        """Unscales what is still there, drops what cannot be, and returns the found_inf of what is left."""
        used = self.find() if self.looks and not is_step else []
        self._were_any = are_any(used) if used else None
        self.unscale()
        if used:
            self.used = _see_grads(one for one in used if one.grad is not None)
        found_inf = self._found_inf if _find_seen(self._unscaled) else None
        self._unscaled, self._lost, self._found_inf, self.scale = [], [], None, None
        return found_inf


def are_any(params: Sequence[Tensor]) -> Tensor:
    """Whether any gradient is not zero, on the device of the first."""
    grads = [param.grad.detach() for param in params]
    found = [(grad.coalesce().values() if grad.is_sparse else grad).any() for grad in grads]
    return torch.stack([one.to(found[0].device) for one in found]).any()


def _see_grads(params: Iterable[Tensor]) -> list[SeenGrad]:
    return [(param, ref(param.grad)) for param in params]


def _find_seen(seen: Iterable[SeenGrad]) -> list[Tensor]:
    """The parameters whose gradients are still the same tensors."""
    return [param for param, find in seen if (grad := param.grad) is not None and grad is find()]
