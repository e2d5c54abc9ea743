"""Gradients: cast to float32, added up, kept in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def cast_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients of half parameters in float32, as new tensors."""
    return [param.grad.float() for param in params]


@torch.no_grad()
def add_grads(earlier: Tensor, new: Tensor) -> Tensor:
    """Adds gradients as autograd does: in place, except where a sparse one is among them."""
    if earlier.is_sparse:
        return earlier + new if new.is_sparse else new + earlier
    return earlier.add_(new)


def own_memory(grad: Tensor) -> Tensor:
    """Copies a gradient that is a view of a bucket, which the next backward would overwrite."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return grad
    shared = grad._is_view() or grad.untyped_storage().nbytes() != grad.nbytes
    return grad.clone() if shared else grad


def find_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients that there are, such that each can be written in place."""
    found = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if _shares_elements(grad):
            grad = param.grad = grad.clone()
        found.append(grad)
    return found


def _shares_elements(grad: Tensor) -> bool:
    """Whether several elements lie at one place in memory, as those of an expanded tensor do."""
    is_plain = type(grad) is Tensor and grad.layout is torch.strided
    return is_plain and torch._debug_has_internal_overlap(grad) == 1


class EarlierGrads:
    """Gradients from before a block, set aside so that the new ones are seen apart from them."""

    def __init__(self) -> None:
        self._set_aside: list[tuple[Tensor, Tensor]] = []

    def take(self, params: Iterable[Tensor]) -> None:
        """Takes the gradients of parameters away."""
        for param in params:
            if param.grad is not None:
                self._set_aside.append((param, own_memory(param.grad)))
                param.grad = None

    @torch.no_grad()
    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes them while they are away."""
        self._set_aside = [(param, change(earlier)) for param, earlier in self._set_aside]

    @torch.no_grad()
    def give_back(self) -> None:
        """Puts them back, with the new ones added."""
        set_aside, self._set_aside = self._set_aside, []
        for param, earlier in set_aside:
            param.grad = earlier if param.grad is None else add_grads(earlier, param.grad)
