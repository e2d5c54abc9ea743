"""Gradients: cast to float32, added up, kept in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ampatch.levels.private import has_function_modes, is_expanded, set_grad


@torch.no_grad()
def cast_grads(grads: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns half gradients in float32, as new tensors with the strides of others.

    Fused optimizers on a CPU walk through memory whatever the strides are (torch 2.13).
    """
    are_plain = set(map(type, grads)) == {Tensor} and True not in [grad.is_sparse for grad in grads]
    if not are_plain or grads[0].device != likes[0].device:
        return [_cast_grad(grad, like) for grad, like in zip(grads, likes, strict=True)]
    # Who watches operations, as the doctor does, would take what was left in free memory for numbers.
    make = torch.zeros_like if has_function_modes() else torch.empty_like
    casts = list(map(make, likes))
    torch._foreach_copy_(casts, grads)
    return casts


def _cast_grad(grad: Tensor, like: Tensor) -> Tensor:
    if type(grad) is Tensor and not grad.is_sparse and grad.device == like.device:
        return torch.empty_like(like).copy_(grad)
    return grad.float()  # sparse, of a kind that wraps others, or on a device where its master is not


@torch.no_grad()
def add_grads(earlier: Tensor, new: Tensor) -> Tensor:
    """Adds gradients as autograd does: in place, except where a sparse one is among them."""
    if earlier.is_sparse:
        return earlier + new if new.is_sparse else new + earlier
    return earlier.add_(new)


@torch.no_grad()
def add_grads_(earlier: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Adds dense gradients to earlier ones, all at once; one after the other where two are one tensor."""
    if len({grad.data_ptr() for grad in earlier}) == len(earlier):
        torch._foreach_add_(earlier, new)
        return
    for one, other in zip(earlier, new, strict=True):
        one.add_(other)


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
        is_strided = type(grad) is Tensor and grad.layout is torch.strided
        if is_strided and not grad.is_contiguous() and is_expanded(grad):
            grad = param.grad = grad.clone()
        found.append(grad)
    return found


class EarlierGrads:
    """Gradients from before a block, set aside so that the new ones are seen apart from them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def take(self, params: Iterable[Tensor]) -> None:
        """Takes the gradients of parameters away."""
        with torch._C.DisableTorchFunction():  # a mode would be told of each
            for param in params:
                grad = param.grad
                if grad is not None:
                    self.pairs.append((param, own_memory(grad)))
                    param.grad = None

    @torch.no_grad()
    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes them while they are away."""
        self.pairs = [(param, change(earlier)) for param, earlier in self.pairs]

    def give_back(self, *, beside: bool = False) -> None:
        """Puts them back, with the new ones added; `beside` new ones that are at the half side of masters."""
        pairs, self.pairs = self.pairs, []
        sums, new = [], []
        for param, earlier in pairs:
            grad = param.grad
            if grad is not None:
                if type(earlier) is type(grad) is Tensor and earlier.layout is grad.layout is torch.strided:
                    sums.append(earlier)
                    new.append(grad)
                else:
                    earlier = add_grads(earlier, grad)
            if beside:
                set_grad(param, earlier)
            else:
                param.grad = earlier
        if sums:
            add_grads_(sums, new)
