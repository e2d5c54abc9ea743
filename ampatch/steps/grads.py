"""Gradients: cast to float32, added up, kept in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ampatch.levels.private import is_expanded


@torch.no_grad()
def cast_grads(grads: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns half gradients in float32, as new tensors with the strides of others.

    Fused optimizers on a CPU walk through memory whatever the strides are (torch 2.13).
    """
    are_plain = set(map(type, grads)) == {Tensor} and True not in [grad.is_sparse for grad in grads]
    if not are_plain or grads[0].device != likes[0].device:
        return [_cast_grad(grad, like) for grad, like in zip(grads, likes, strict=True)]
    casts = list(map(torch.empty_like, likes))
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


@torch.no_grad()
def accumulate_(
    sums: list[Tensor], halves: list[Tensor], most: int, change: Callable[[list[Tensor]], None] | None
) -> None:
    """Adds half gradients to float32 ones, cast first and then changed, so many elements at a time.

    Large ones are cast in slices, because what is written and read at once should stay in a cache.
    """
    for totals, news in _split(sums, halves, most):
        casts = cast_grads(news, totals)
        if change is not None:
            change(casts)
        add_grads_(totals, casts)


def _split(
    sums: list[Tensor], halves: list[Tensor], most: int
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Splits two lists into parts of at most so many elements, where it can."""
    sizes = [half.numel() for half in halves]
    size = start = 0
    for index, count in enumerate(sizes):
        if size and size + count > most:
            yield sums[start:index], halves[start:index]
            size, start = 0, index
        size += count
        if count > most and sums[index].is_contiguous() and halves[index].is_contiguous():
            yield from _slice(sums[index], halves[index], most)
            size, start = 0, index + 1
    if size:
        yield sums[start:], halves[start:]


def _slice(total: Tensor, half: Tensor, most: int) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    pieces = [one.detach().view(-1).split(most) for one in (total, half)]
    for piece, new in zip(*pieces, strict=True):
        yield [piece], [new]


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
        self._set_aside: list[tuple[Tensor, Tensor]] = []

    def take(self, params: Iterable[Tensor]) -> None:
        """Takes the gradients of parameters away."""
        with torch._C.DisableTorchFunction():  # a mode would be told of each
            for param in params:
                grad = param.grad
                if grad is not None:
                    self._set_aside.append((param, own_memory(grad)))
                    param.grad = None

    @torch.no_grad()
    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes them while they are away."""
        self._set_aside = [(param, change(earlier)) for param, earlier in self._set_aside]

    def give_back(self) -> None:
        """Puts them back, with the new ones added."""
        set_aside, self._set_aside = self._set_aside, []
        sums, new = [], []
        for param, earlier in set_aside:
            grad = param.grad
            if grad is None:
                param.grad = earlier
            elif type(earlier) is type(grad) is Tensor and earlier.layout is grad.layout is torch.strided:
                param.grad = earlier
                sums.append(earlier)
                new.append(grad)
            else:
                param.grad = add_grads(earlier, grad)
        if sums:
            add_grads_(sums, new)


def leads_to(roots: Sequence[Tensor], scaled: Tensor) -> bool:
    """Whether any of these tensors was computed from the scaled loss.

    Nodes of a graph are numbered as they are made, so those older than the scaled loss need no look.
    """
    target = scaled.grad_fn
    if any(root is scaled for root in roots) or target is None:
        return True
    first = target._sequence_nr()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is target:
            return True
        inner = {one for one, _ in node.next_functions if one is not None and one._sequence_nr() >= first}
        waiting += inner - seen
        seen |= inner
    return False
