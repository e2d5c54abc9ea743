"""The gradient of a half weight: one float32 tensor, which the half parameter and its master both hold."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import TAKES_ANY_GRAD
from ampatch.steps.grads.plain import add_grads, cast_grads
from ampatch.steps.masters.weight import Weight

# How many elements are cast at a time. What was cast is freed before the next ones are; on a CPU they stay in
# its cache, and below what malloc gives back to the system and then has to ask for again.
MOST_ON_CPU, MOST_ON_GPU = 2**19, 2**24


class MasterGrads:
    """Has each half weight of one optimizer and its master hold one gradient, as a float32 weight does.

    A backward leaves half gradients; `share` casts them, and gives both sides the same tensor. Whoever reads
    or writes it from then on, on either side, reads or writes the gradient; whoever replaces or clears it on
    one side has `share` do so on the other.
    """

    def __init__(self, pairs: list[Weight]) -> None:
        self.pairs = pairs

    def share(self, *, keeps_graphs: bool = False) -> None:
        """Has both sides hold the gradient that counts; no host sync.

        With `keeps_graphs` half gradients that have a graph (`create_graph=True`) stay as they are.
        """
        changed = []
        with torch._C.DisableTorchFunction():  # a mode, as of a default device, would see each attribute
            for pair in self.pairs:
                if pair.half.grad is not pair.master.grad and (TAKES_ANY_GRAD or not pair.holds_grad()):
                    changed.append(pair)
        if changed:  # modes see the casts, as the doctor's, which follows bad numbers
            _settle(changed, keeps_graphs)

    def take_away(self) -> None:
        """Takes the gradients away from both sides, for somebody who keeps them."""
        for pair in self.pairs:
            pair.half.grad = pair.master.grad = pair.grad = pair.half_grad = None

    def clear(self) -> None:
        """Clears the half sides, of which the masters' were cleared."""
        for pair in self.pairs:
            pair.half.grad = pair.grad = pair.half_grad = None


@torch.no_grad()
def _settle(changed: Sequence[Weight], keeps_graphs: bool) -> None:
    new = []
    for pair in changed:
        grad = pair.half.grad
        if grad is None or grad.dtype not in HALF_TYPES:
            pair.hold_grad(_find_changed_side(pair))
        elif not (keeps_graphs and grad.requires_grad):
            new.append(pair)
    for part in _split(new):
        halves, masters = [], []
        for pair in part:
            halves.append(pair.half.grad)
            masters.append(pair.master)
        for pair, cast in zip(part, cast_grads(halves, masters), strict=True):
            earlier = pair.master.grad
            if earlier is not None and earlier is not pair.find_grad():
                cast = add_grads(earlier, cast)  # of who had put it there before the backward
            if TAKES_ANY_GRAD and pair.half.grad_dtype is None:  # `Weight.hold_grad`, written out
                pair.half.grad = pair.master.grad = cast
                pair.grad = pair.half_grad = ref(cast)
            else:
                pair.hold_grad(cast)


def _find_changed_side(pair: Weight) -> Tensor | None:
    """Returns the gradient of the side that holds another one than both did before, or none any more."""
    half, master, before = pair.half.grad, pair.master.grad, pair.find_grad()
    if half is not None and pair.half_grad is not None and half is pair.half_grad():
        return half if pair.shows_other_grad(half) else master
    is_half_side = master is before and (half is not None or before is not None)
    return half if is_half_side else master


def _split(pairs: Sequence[Weight]) -> list[Sequence[Weight]]:
    parts, size, start = [], 0, 0
    most = MOST_ON_CPU if pairs and pairs[0].half.is_cpu else MOST_ON_GPU
    for index, pair in enumerate(pairs):
        size += pair.half.numel()
        if size > most:
            parts.append(pairs[start : index + 1])
            size, start = 0, index + 1
    return parts if start == len(pairs) else [*parts, pairs[start:]]
