"""Gradients: cast to float32, added up, kept in memory of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampatch.levels.private import is_expanded

if TYPE_CHECKING:
    from ampatch.steps.master_grads import MasterGrads
    from ampatch.steps.scaler import Scale

SeenGrad = tuple[Tensor, Tensor, int]  # a parameter, the gradient that it has, and its version


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

    def give_back_untouched(self) -> None:
        """Puts those back whose parameters have no new one."""
        for param, earlier in self._set_aside:
            if param.grad is None:
                param.grad = earlier
        self._set_aside = [one for one in self._set_aside if one[0].grad is not one[1]]

    def keep(self, params: Iterable[Tensor]) -> None:
        """Drops those of all other parameters that have new ones."""
        kept = set(map(id, params))
        self._set_aside = [one for one in self._set_aside if id(one[0]) in kept]

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


class UnnamedGrads:
    """The gradients of one optimizer that are scaled, and that no block of `scale_loss` unscales.

    A block that names other optimizers makes them, and so does a backward of the scaled loss after its block.
    They stay scaled until somebody needs them: in a GAN nobody does, where the generator's loss leaves some
    at the discriminator, and `zero_grad` clears them. Gradients from before are kept apart until then.
    """

    def __init__(self) -> None:
        self.scale: Scale | None = None  # of the last such backward; None where nothing is left
        self.were_stepped = False  # whether gradients from before have been in a step
        self.were_used: Tensor | None = None  # whether a block of the optimizer's own has added to some
        self._is_open = False  # while such a backward runs
        self._own: Sequence[Tensor] = ()  # the parameters that have no masters
        self._of_masters: MasterGrads | None = None
        self._earlier = EarlierGrads()
        self._scaled: list[SeenGrad] = []  # what the last such backward left
        self._unscaled: list[SeenGrad] = []  # what others left before, and has been unscaled since
        self._found_inf: Tensor | None = None  # of these

    def begin(self, scale: Scale, own: Sequence[Tensor], of_masters: MasterGrads) -> None:
        """Sets gradients aside before such a backward: those of `own` parameters, and those of masters."""
        self.unscale()
        of_masters.follow()
        of_masters.begin()
        self._earlier.take(own)
        self.scale, self._own, self._of_masters, self._is_open = scale, own, of_masters, True

    def end(self, *, keeps: bool = True) -> bool:
        """Notes what the backward has left, and says whether it left any; or drops it."""
        if not self._is_open:
            return False
        self._is_open = False
        params = (*self._own, *(pair.half for pair in self._of_masters.pairs))
        for param in params if not keeps else ():
            param.grad = None
        self._scaled = _see_grads(params)
        self._earlier.give_back_untouched()
        if self._scaled and self.were_stepped:  # nobody wants these again
            self._earlier.keep(())
            self.were_stepped = False
        self._of_masters.end()
        self._of_masters.note_seen()
        if not (self._scaled or self._unscaled):
            self.scale = None
        return bool(self._scaled)

    @torch.no_grad()
    def unscale(self, *, edited: bool = False) -> None:
        """Unscales what is still there, and adds it to what was there before; no host sync.

        Cleared ones are not there any more. What was changed in place was cleared to zero, or `edited`, as
        by clipping; in either case nothing is added to it.
        """
        self.end()
        self._earlier.keep(_find_seen(self._scaled, edited=False))
        params, self._scaled = _find_seen(self._scaled, edited=edited), []
        if params:
            if self._found_inf is None:
                self._found_inf = self.scale.scaler.new_found_inf()
            unscale = functools.partial(self.scale.unscale_, found_inf=self._found_inf)
            pairs = {id(pair.half): pair for pair in self._of_masters.pairs}
            unscale(find_grads(param for param in params if id(param) not in pairs))
            self._of_masters.feed(unscale, [pairs[id(param)] for param in params if id(param) in pairs])
            self._earlier.give_back()
        left = {id(param): param for param in (*_find_seen(self._unscaled, edited=True), *params)}
        self._unscaled = _see_grads(left.values())

    def settle(self, *, is_step: bool) -> tuple[Scale, Tensor] | None:
        """Unscales what is still there, which counts from now on; returns its scale and found_inf."""
        self.unscale(edited=is_step)
        params, scale, found_inf = _find_seen(self._unscaled, edited=True), self.scale, self._found_inf
        self._unscaled, self._found_inf, self.scale = [], None, None
        if not params:
            return None
        if not is_step:
            self.were_used = are_any(params)
        return scale, found_inf

    def find_used(self) -> Tensor | None:
        """Whether a step is about to use any, on the device; None where all were cleared."""
        were_used, self.were_used = self.were_used, None
        params = _find_seen([*self._scaled, *self._unscaled], edited=True)
        return are_any(params) if params else were_used


def are_any(params: Sequence[Tensor]) -> Tensor:
    """Whether any gradient is not zero, on the device of the first."""
    grads = [param.grad.detach() for param in params]
    found = [(grad.coalesce().values() if grad.is_sparse else grad).any() for grad in grads]
    return torch.stack([one.to(found[0].device) for one in found]).any()


def _see_grads(params: Iterable[Tensor]) -> list[SeenGrad]:
    return [(param, param.grad, param.grad._version) for param in params if param.grad is not None]


def _find_seen(seen: Iterable[SeenGrad], *, edited: bool) -> list[Tensor]:
    return [one for one, grad, version in seen if one.grad is grad and (edited or grad._version == version)]
