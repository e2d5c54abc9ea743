"""The gradient of a half weight: one float32 tensor, which the half parameter and its master both hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import TAKES_ANY_GRAD, set_grad
from ampatch.steps.grads.plain import add_grads, cast_grads
from ampatch.steps.masters.weight import Weight

# How many elements are cast at a time. What was cast is freed before the next ones are; on a CPU they stay in
# its cache, and below what malloc gives back to the system and then has to ask for again.
MOST_ON_CPU, MOST_ON_GPU = 2**19, 2**24


class MasterGrads:
    """Has each half weight of one optimizer and its master hold one gradient, as a float32 weight does.

    A backward leaves half gradients; `share` casts them, and gives both sides the same tensor. Whoever reads
    or writes it from then on, on either side, reads or writes the gradient; who assigns one on either side
    while a session is open assigns it on both (`Weight.assign_grad`).
    """

    def __init__(self, pairs: list[Weight]) -> None:
        self.pairs = pairs

    def share(self, *, keeps_graphs: bool = False, adds: bool = False) -> None:
        """Has both sides hold the gradient that counts; no host sync.

        With `keeps_graphs` half gradients that have a graph (`create_graph=True`) stay as they are; with
        `adds`, what the master holds counts beside a half gradient: a backward has reached both, or what was
        there before was put there.
        """
        changed = []
        with torch._C.DisableTorchFunction():  # a mode, as of a default device, would see each attribute
            for pair in self.pairs:
                if pair.half.grad is not pair.master.grad and (TAKES_ANY_GRAD or not pair.holds_grad()):
                    changed.append(pair)
        if changed:  # modes see the casts, as the doctor's, which follows bad numbers
            _settle(changed, keeps_graphs, adds)

    def clear(self) -> None:
        """Clears both sides."""
        for pair in self.pairs:
            set_grad(pair.half, None)
            set_grad(pair.master, None)

    def leave(self, *_: object) -> None:
        """Leaves the gradients to the half sides alone, where nobody sees one cleared; a hook of a step."""
        for pair in self.pairs:
            pair.master.grad = None


@torch.no_grad()
def _settle(changed: Sequence[Weight], keeps_graphs: bool, adds: bool) -> None:
    new = []
    for pair in changed:
        grad = pair.half.grad
        if grad is None or grad.dtype not in HALF_TYPES:
            pair.hold_grad(pair.find_grad())
        elif pair.master.grad is not None and not adds:  # which a reducer has copied into its bucket
            pair.hold_grad(pair.master.grad)
        elif not (keeps_graphs and grad.requires_grad):
            new.append(pair)
    for part in _split(new):
        halves, masters = [], []
        for pair in part:
            halves.append(pair.half.grad)
            masters.append(pair.master)
        for pair, cast in zip(part, cast_grads(halves, masters), strict=True):
            if pair.master.grad is not None:
                cast = add_grads(pair.master.grad, cast)
            if TAKES_ANY_GRAD and pair.half.grad_dtype is None:  # `Weight.hold_grad`, written out
                set_grad(pair.half, cast)
                set_grad(pair.master, cast)
            else:
                pair.hold_grad(cast)


def _split(pairs: Sequence[Weight]) -> list[Sequence[Weight]]:
    parts, size, start = [], 0, 0
    most = MOST_ON_CPU if pairs and pairs[0].half.is_cpu else MOST_ON_GPU
    for index, pair in enumerate(pairs):
        size += pair.half.numel()
        if size > most:
            parts.append(pairs[start : index + 1])
            size, start = 0, index + 1
    return parts if start == len(pairs) else [*parts, pairs[start:]]
