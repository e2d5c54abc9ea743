"""Gradients: cast to float32, added up, kept in memory of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from ampatch.levels.private import is_expanded

if TYPE_CHECKING:
    from ampatch.steps.master_grads import MasterGrads
    from ampatch.steps.scaler import Scale

SeenGrad = tuple[Tensor, "ref[Tensor]", int]  # a parameter, the gradient that it has, and its version


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


class UnnamedGrads:
    """The gradients of one optimizer that are scaled, and that no block of `scale_loss` unscales.

    A block that names other optimizers makes them, and so does a backward of the scaled loss after its block.
    They are left as they are until somebody needs them: in a GAN nobody does, where the generator's loss
    leaves some at the discriminator, and `zero_grad` clears them. What a script changes is its own.
    """

    def __init__(self) -> None:
        self.scale: Scale | None = None  # of the last such backward; None where nothing is left
        self._used: list[SeenGrad] = []  # to which a backward of its own has added
        self._were_any: Tensor | None = None  # whether these were not zero before
        self._before: list[tuple[Tensor, Tensor | None, int, bool]] = []  # and if it is scaled; in a backward
        self._scaled: list[SeenGrad] = []
        self._mixed: list[SeenGrad] = []  # scaled ones that were added to others
        self._unscaled: list[SeenGrad] = []  # for a reader
        self._found_inf: Tensor | None = None  # of these

    def begin(self, params: Iterable[Tensor]) -> None:
        """Looks at the gradients of parameters before such a backward."""
        scaled = {id(param) for param in _find_seen(self._scaled)}
        self._before = [
            (param, grad := param.grad, -1 if grad is None else grad._version, id(param) in scaled)
            for param in params
        ]

    def end(self, scale: Scale) -> bool:
        """Notes which ones the backward has changed, and says whether it did; keeps none of them alive."""
        before, self._before = self._before, []
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

    def find_used(self) -> Tensor | None:
        """Whether the own gradients have some in them, on the device; None where none are left."""
        used, self._used = _find_seen(self._used, edited=True), []
        return self._were_any if used else None

    def find(self) -> list[Tensor]:
        """The parameters that still have what was left there."""
        return [*_find_seen(self._scaled), *_find_seen(self._mixed), *_find_seen(self._unscaled, edited=True)]

    @torch.no_grad()
    def unscale(self, of_masters: MasterGrads) -> None:
        """Unscales what is still there; no host sync."""
        params, self._scaled = _find_seen(self._scaled), []
        if not params:
            return
        if self._found_inf is None:
            self._found_inf = self.scale.scaler.new_found_inf()
        unscale = functools.partial(self.scale.unscale_, found_inf=self._found_inf)
        pairs = {id(pair.half): pair for pair in of_masters.pairs}
        unscale(find_grads(param for param in params if id(param) not in pairs))
        of_masters.feed(unscale, [pairs[id(param)] for param in params if id(param) in pairs])
        self._unscaled += _see_grads(params)

    def settle(self, of_masters: MasterGrads, *, is_step: bool) -> Tensor | None:
        """Unscales what is still there, drops what cannot be, and returns the found_inf of what is left."""
        used = self.find()
        self.unscale(of_masters)
        pairs = {id(pair.half): pair for pair in of_masters.pairs}
        if used and not is_step:
            self._were_any = are_any(used)
            holders = [pairs[id(one)].master if id(one) in pairs else one for one in used]
            self._used = _see_grads(one for one in holders if one.grad is not None)
        for param in _find_seen(self._mixed):
            if id(param) in pairs:
                of_masters.skip(pairs[id(param)])
            else:
                param.grad = None
        found_inf = self._found_inf if _find_seen(self._unscaled, edited=True) else None
        self._mixed, self._unscaled, self._found_inf, self.scale = [], [], None, None
        return found_inf


def are_any(params: Sequence[Tensor]) -> Tensor:
    """Whether any gradient is not zero, on the device of the first."""
    grads = [param.grad.detach() for param in params]
    found = [(grad.coalesce().values() if grad.is_sparse else grad).any() for grad in grads]
    return torch.stack([one.to(found[0].device) for one in found]).any()


def _see_grads(params: Iterable[Tensor]) -> list[SeenGrad]:
    return [(param, ref(param.grad), param.grad._version) for param in params]


def _find_seen(seen: Iterable[SeenGrad], *, edited: bool = False) -> list[Tensor]:
    """The parameters whose gradients are still the same, `edited` or not."""
    return [
        param
        for param, find, version in seen
        if (grad := param.grad) is not None and grad is find() and (edited or grad._version == version)
    ]
