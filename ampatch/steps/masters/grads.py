"""The gradient of a half weight: one float32 tensor, which the half parameter and its master both hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import TAKES_ANY_GRAD
from ampatch.steps.grads.plain import add_grads, cast_grads
from ampatch.steps.masters.params import do_nothing
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
        with torch._C.DisableTorchFunction():  # a mode, as of a default device, would see each attribute
            changed = [pair for pair in self.pairs if pair.half.grad is not pair.master.grad]
            if not TAKES_ANY_GRAD:
                changed = [pair for pair in changed if not pair.holds_grad()]
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


class NoMasterGrads(MasterGrads):
    """Stands in for the gradients of masters where an optimizer has none."""

    share = take_away = clear = do_nothing  # type: ignore[assignment]


@torch.no_grad()
def _settle(changed: Sequence[Weight], keeps_graphs: bool) -> None:
    is_new = [grad is not None and grad.dtype in HALF_TYPES for grad in (pair.half.grad for pair in changed)]
    for pair in (pair for pair, made in zip(changed, is_new, strict=True) if not made):
        pair.hold_grad(_find_changed_side(pair))
    new = [pair for pair, made in zip(changed, is_new, strict=True) if made]
    if keeps_graphs:
        new = [pair for pair in new if not pair.half.grad.requires_grad]
    for part in _split(new):
        casts = cast_grads([pair.half.grad for pair in part], [pair.master for pair in part])
        for pair, cast in zip(part, casts, strict=True):
            earlier = pair.master.grad
            if earlier is not None and earlier is not pair.find_grad():
                cast = add_grads(earlier, cast)  # of who had put it there before the backward
            pair.hold_grad(cast)


def _find_changed_side(pair: Weight) -> Tensor | None:
    """Returns the gradient of the side that holds another one than both did before, or none any more."""
    half, master, before = pair.half.grad, pair.master.grad, pair.find_grad()
    if half is not None and pair.half_grad is not None and half is pair.half_grad():
        return master
    is_half_side = master is before and (half is not None or before is not None)
    return half if is_half_side else master


def _split(pairs: Sequence[Weight]) -> Iterator[Sequence[Weight]]:
    size = start = 0
    most = MOST_ON_CPU if pairs and pairs[0].half.is_cpu else MOST_ON_GPU
    for index, pair in enumerate(pairs):
        size += pair.half.numel()
        if size > most:
            yield pairs[start : index + 1]
            size, start = 0, index + 1
    if size:
        yield pairs[start:]
