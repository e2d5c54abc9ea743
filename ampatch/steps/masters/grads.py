"""The gradients of masters: float32 copies of those that backward leaves at half parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ampatch.steps.grads.plain import add_grads, add_grads_, cast_grads
from ampatch.steps.masters.params import do_nothing
from ampatch.steps.masters.weight import Weight

Unscale = Callable[[list[Tensor]], None]

# How many float32 copies are in memory at a time while they are added to earlier gradients. On a CPU they
# stay in its cache, and below what malloc gives back to the system and then has to ask for again.
COPIES_ON_CPU, COPIES_ON_GPU = 2**19, 2**24


class MasterGrads:
    """Feeds the masters of one optimizer with the gradients of its half parameters.

    A half gradient counts once: each pair remembers which one has gone into the master's (`grad_used`).
    Every step asks each pair several times; that is why the loops make no calls.
    """

    def __init__(self, pairs: list[Weight]) -> None:
        self.pairs = pairs
        self.told = False  # that a step ignored changes
        # Half gradients from before the open block, and which of these were used.
        self._before: list[tuple[Weight, Tensor, Tensor | None]] = []

    # Between blocks

    def follow(self, *, is_step: bool = False, looks: bool = False) -> bool:
        """Takes over what happened to half gradients since they were last seen, whoever did it.

        New ones, of a `backward` outside any block, are unscaled and count. So does what was changed
        while no block has scaled it, as where gradients are cleared to zero or never, or clipped: it is all
        of the gradient, unless the master has others beside. For the rest see `drop_restarted`, and it
        `looks` whether a scaled one was cleared to zero before it sees the next. Says whether a step
        ignores changes, unless that was `told`. Both cost a host sync if one was changed in place.
        """
        changed = self._find_changed()
        if not changed:
            return False
        for pair in changed:
            if not pair.grad_scaled and (pair.master.grad is None or _is_rewritten(pair)):
                pair.grad_used = pair.master.grad = None
        new = [pair for pair in changed if pair.grad_used is None or pair.master.grad is None]
        self.feed(None, new if is_step else [pair for pair in new if not _is_cleared(pair)])
        to_tell = is_step and not self.told
        return _drop_restarted(changed, to_tell or looks) and to_tell

    def drop_restarted(self) -> None:
        """Drops masters' gradients where the model's were cleared: a wish to start over.

        Costs one host sync, and that only if one was changed in place while its master had a gradient.
        """
        _drop_restarted(self._find_changed(), to_look=False)

    def _find_changed(self) -> list[Weight]:
        """The pairs whose half gradient is not the one that was used, or not as it was then."""
        with torch._C.DisableTorchFunction():  # a mode, as of a default device, would see each attribute
            changed = [
                pair
                for pair in self.pairs
                if (grad := pair.half.grad) is not pair.grad_used
                or grad is not pair.grad_seen
                or (grad is not None and grad._version != pair.grad_version)
            ]
            return [pair for pair in changed if not pair.was_grad_read()]

    # A block

    def begin(self) -> None:
        """Takes the half gradients away, so that what is there afterwards is new."""
        self._before = []
        with torch._C.DisableTorchFunction():
            for pair in self.pairs:
                if pair.steps:
                    clear_master_grad(pair)
                self._set_aside(pair)

    def begin_again(self) -> None:
        """Lets gradients of an earlier block, which stayed scaled, count together with new ones."""
        self._before = []
        for pair in self.pairs:
            if pair.grad_used is pair.half.grad:
                self._set_aside(pair)  # from before that block, which made none
            else:
                pair.grad_used = pair.grad_seen = None

    def _set_aside(self, pair: Weight) -> None:
        half = pair.half
        if half.grad is not None:
            self._before.append((pair, half.grad, pair.grad_used))
            half.grad = None
        pair.grad_used = pair.grad_seen = None

    def feed(self, unscale: Unscale | None, pairs: Sequence[Weight] | None = None) -> None:
        """Adds new half gradients, of all pairs or of some, to the masters', each `unscale`d in float32."""
        first: list[Weight] = []
        others: list[Weight] = []
        is_scaled = unscale is not None
        for pair in self.pairs if pairs is None else pairs:
            grad, used = pair.half.grad, pair.grad_used
            if grad is None or grad is used or not (used is None or pair.has_fresh_grad()):
                continue
            pair.grad_used = pair.grad_seen = grad
            pair.grad_version, pair.grad_scaled = grad._version, is_scaled
            pair.grad_alone = is_alone = pair.master.grad is None
            (first if is_alone else others).append(pair)
        for pair, grad in zip(first, _cast(first, unscale), strict=True):
            pair.master.grad = grad
        if others:
            _add(others, unscale)

    def by_half(self) -> dict[int, Weight]:
        """The pairs, by the ids of their half parameters."""
        return {id(pair.half): pair for pair in self.pairs}

    def skip(self, pair: Weight) -> None:
        """Takes the half gradient as it is now for one that counts already."""
        mark_grad_used(pair)

    def end(self) -> None:
        """Puts a gradient from before the block back where the block made none."""
        before, self._before = self._before, []
        for pair, grad, used in before:
            if pair.half.grad is None:
                pair.half.grad, pair.grad_used = grad, used
                _mark_grad_seen(pair)

    def note_seen(self) -> None:
        """Notes the half gradients as they are now, used or not."""
        for pair in self.pairs:
            _mark_grad_seen(pair)

    # A step

    def drop(self) -> None:
        """Clears the masters' gradients once every optimizer that steps them has used them.

        Those of the model stay where they are. `mark_grad_used` and `clear_master_grad` are written out:
        this runs for each parameter at each step.
        """
        for pair in self.pairs:
            pair.grad_used = pair.grad_seen = grad = pair.half.grad
            if grad is not None:
                pair.grad_version = grad._version
            pair.steps += 1
            if pair.steps >= pair.optimizers:
                pair.master.grad = None
                pair.steps = 0

    def clear(self, *, set_to_none: bool) -> None:
        """Clears the half gradients, as `Optimizer.zero_grad` does; zeros are new ones for a step."""
        for pair in self.pairs:
            half = pair.half
            if not set_to_none and half.grad is not None:
                half.grad = half.grad.detach().zero_()
                pair.grad_used, pair.grad_scaled = None, False
                _mark_grad_seen(pair)
            else:
                half.grad = pair.grad_used = pair.grad_seen = None


class NoMasterGrads(MasterGrads):
    """Stands in for the gradients of masters where an optimizer has none."""

    follow = drop_restarted = begin = begin_again = feed = end = note_seen = drop = clear = do_nothing  # type: ignore[assignment]


def mark_grad_used(pair: Weight) -> None:
    """Notes that the half gradient, as it is now, has gone into the master's."""
    pair.grad_used = pair.half.grad
    _mark_grad_seen(pair)


def _mark_grad_seen(pair: Weight) -> None:
    pair.grad_seen = grad = pair.half.grad
    if grad is not None:
        pair.grad_version = grad._version


def clear_master_grad(pair: Weight) -> None:
    """Clears the master's gradient."""
    pair.master.grad = None
    pair.steps = 0


def _drop_restarted(pairs: Sequence[Weight], to_look: bool) -> bool:
    """Returns whether any change was not taken over; needs `to_look` for one whose master has no gradient."""
    cleared = [pair for pair in pairs if pair.grad_seen is not None and pair.half.grad is None]
    edited = [pair for pair in pairs if (to_look or pair.master.grad is not None) and _was_edited(pair)]
    # Zeroing leaves +0 everywhere; clipping by an infinite norm, for one, leaves -0 and nan as well.
    bits = [pair.half.grad.detach().view(torch.int16).any() for pair in edited]
    is_zeroed = bool(bits) and not torch.stack([bit.to(bits[0].device) for bit in bits]).any()
    for pair in [*cleared, *edited] if is_zeroed else cleared:
        clear_master_grad(pair)
        pair.grad_used, pair.grad_scaled = None, False  # zeros are new ones for a step
        _mark_grad_seen(pair)
    is_edited = not is_zeroed and any(pair.grad_used is pair.half.grad for pair in edited)
    return is_edited or (to_look and any(map(_is_ignored, pairs)))


def _is_cleared(pair: Weight) -> bool:
    """Whether all there is are the zeros of `zero_grad`: only a step needs these."""
    grad = pair.half.grad
    if grad is None or grad is not pair.grad_seen or pair.grad_used is not None:
        return False
    return grad._version == pair.grad_version


def _is_rewritten(pair: Weight) -> bool:
    """Whether the half gradient that the master has, and no other, was changed or replaced."""
    grad, used = pair.half.grad, pair.grad_used
    is_one = pair.grad_alone and grad is not None and used is not None
    return is_one and (grad is used or pair.has_fresh_grad())


def _is_ignored(pair: Weight) -> bool:
    """Whether the half gradient was put in the place of one that was used, and was not used itself."""
    return pair.grad_used is not None and pair.has_fresh_grad()


def _was_edited(pair: Weight) -> bool:
    """Whether the half gradient was changed in place since it was seen; of a sparse one, it never counts."""
    grad = pair.half.grad
    if grad is None or grad is not pair.grad_seen:
        return False
    return grad._version != pair.grad_version and not grad.is_sparse


def _add(pairs: list[Weight], unscale: Unscale | None) -> None:
    sums, halves, rest = [], [], []
    for pair in pairs:
        total, half = pair.master.grad, pair.half.grad
        if pair.is_wrapper or total.is_sparse or half.is_sparse:
            rest.append(pair)
        else:
            sums.append(total)
            halves.append(half)
    if halves:
        accumulate_(sums, halves, COPIES_ON_CPU if halves[0].is_cpu else COPIES_ON_GPU, unscale)
    for pair, grad in zip(rest, _cast(rest, unscale), strict=True):
        pair.master.grad = add_grads(pair.master.grad, grad)


def _cast(pairs: list[Weight], unscale: Unscale | None) -> list[Tensor]:
    grads = cast_grads([pair.half.grad for pair in pairs], [pair.master for pair in pairs])
    if unscale is not None and grads:
        unscale(grads)
    return grads


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
