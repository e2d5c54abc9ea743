"""One weight of a half model: the half tensor, and the float32 values that are its truth."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.levels.private import TAKES_ANY_GRAD, allow_any_grad, give_float32_grad, is_expanded, set_grad
from ampatch.levels.stack import StepLock
from ampatch.steps.masters.tensors import (
    is_alone,
    is_comparable,
    is_wrapper,
    make_dense,
    refine,
    version_of,
)


class Weight:
    """A half parameter or buffer, and its float32 values: the originals while they hold, or a master.

    A float32 value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins. Who reads sees that, and changes nothing:
    weights that are swapped in, saved and swapped back train on from the float32 values that they had. A step
    takes what was written. But what was written into the float32 values goes into the half tensor first: a
    `state_dict()` shows them, and who writes there, as averages of weights do, writes into the model.

    A master is a parameter that optimizers step in the place of the half one. `touched` holds the ids of
    tensors that may have been written without a trace; None where nobody watches.
    """

    __slots__ = (
        *("half", "is_wrapper", "kept", "master", "pointer", "precise", "seen", "shown", "touched"),
        *("__weakref__", "grad_pointer", "lock", "version", "written"),
    )

    def __init__(self, half: Tensor, precise: Tensor | None = None, touched: set[int] | None = None) -> None:
        self.half = half
        self.precise = precise  # None where there are no float32 values, or none any more
        self.master: Parameter | None = None  # the same, once an optimizer steps them
        self.kept: Tensor | None = None  # what the master was before it showed what no step has taken
        self.touched = touched
        self.lock = StepLock()
        self.shown: Tensor | None = None  # what a state_dict shows, if forwards are to look for edits of it,
        self.seen = 0  # and its version then
        self.grad_pointer = 0  # of the gradient of both, where each has a tensor of its own to show it
        self.is_wrapper = is_wrapper(half)
        self.mark_synced()

    # Float32 values

    def mark_synced(self) -> None:
        """Notes that the half tensor holds the rounding of the float32 values."""
        half, precise = self.half, self.precise
        self.version = version_of(half)
        self.written = 0 if precise is None else version_of(precise)
        self.pointer = 0 if self.master is None else half.data_ptr()
        if self.touched:
            self.touched.difference_update((id(half), id(precise)))

    def remember(self, precise: Tensor | None) -> None:
        """Takes float32 values of which the half tensor holds the rounding; None frees those that it had."""
        self.precise = precise
        self.mark_synced()

    def find_precise(self) -> Tensor | None:
        """The float32 values, None where there are none or they may not hold any more."""
        half, precise = self.half, self.precise
        if precise is None or precise.is_meta is not half.is_meta:  # Module.to_empty, or to("meta")
            return None
        return precise if is_comparable(half) or version_of(half) == self.version else None

    def find_written(self) -> Tensor | None:
        """What was written of the float32 values, or of those shown, and is not in the half tensor yet."""
        precise, shown = self.precise, self.shown
        if shown is not None and shown is not precise and version_of(shown) != self.seen:
            return shown
        if precise is None or (version_of(precise) == self.written and not self.was_asked_last()):
            return None
        return precise

    def was_asked_last(self) -> bool:
        """Whether somebody asked for `.data` of the float32 values, and wrote no half tensor since."""
        touched = self.touched
        return bool(touched) and id(self.precise) in touched and version_of(self.half) == self.version

    @torch.no_grad()
    def follow(self) -> None:
        """Rounds the float32 values into the half tensor if they were written since; no host sync."""
        written = self.find_written()
        if written is None:
            return
        if written is self.shown:
            self._adopt(written)
        elif (kept := self._find_kept()) is not None:  # what the master shows of edits was not written
            kept.copy_(torch.where(written == refine(kept, self.half), kept, written))
        self.half.copy_(written)
        self.mark_synced()
        self._keep_touched()

    def _adopt(self, shown: Tensor) -> None:
        """Takes what somebody wrote into values that were made to be shown."""
        if self.precise is None:
            self.precise = shown
        else:
            self.precise.copy_(shown)
        self.kept, self.shown = None, self.precise if self.master is None else None

    def _follow_reader(self) -> None:
        """Takes what was written into shown values, or into a master that shows edits."""
        written = self.find_written()
        if written is not None and (written is self.shown or self._find_kept() is not None):
            if written is self.shown or version_of(self.half) == self.version:
                self.follow()
            else:
                self.kept = None

    def follow_shown(self) -> None:
        """Does so for what a state_dict showed, and frees what was made for that and not written."""
        if self.shown is not None:
            self.follow()
            if self.shown is not self.precise:
                self.shown = None

    def read(self) -> Tensor:
        """Returns the float32 values, with what was written into the half tensor since; no host sync."""
        with self.lock as is_free:
            changed = self._find_changed(is_free)
            return self.precise.detach() if changed is None else changed  # type: ignore[union-attr]

    @torch.no_grad()
    def _find_changed(self, is_free: bool) -> Tensor | None:
        """What `read` returns where that is not in the memory of the float32 values."""
        if is_free:
            self.follow()
        precise, half = self.find_precise(), self.half
        if precise is None:
            return half.detach().float()
        if not is_free or not is_comparable(half):
            return None
        kept = self._find_kept()
        values = (precise if kept is None else kept).detach()
        is_own = kept is None and not precise.is_inference() and not is_expanded(precise)
        if values.device != half.device:  # by Module.to
            values, is_own = values.to(half.device), False
        return None if is_own and self._is_untouched() else refine(values, half)

    def _is_untouched(self) -> bool:
        """Whether nobody can have written the half tensor since it held the rounding."""
        half = self.half
        is_watched = self.touched is not None and not (self.is_wrapper or half.is_inference())
        return is_watched and not self.is_edited() and is_alone(half)

    def export(self, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for the half tensor, of which it holds `saved`.

        What is written there before the model's next forward, or while it is kept, goes into the model.
        """
        if self.master is not None and saved is self.half:  # state_dict(keep_vars=True)
            self.show_edit()
            return self.master
        with self.lock as is_free:
            changed = self._find_changed(is_free)
            if changed is None:
                self.shown = None if self.master is not None else self.precise
                return self.precise.detach()  # type: ignore[union-attr]
            if self._is_made_like(changed):  # for another name of a tied weight, or an earlier state_dict
                self.shown.copy_(changed)  # type: ignore[union-attr]
            else:
                self.shown = changed
            self.seen = version_of(self.shown)
            return self.shown.detach()

    def _is_made_like(self, changed: Tensor) -> bool:
        shown = self.shown
        is_made = shown is not None and shown is not self.precise and not shown.is_inference()
        return is_made and shown.device == changed.device and shown.shape == changed.shape

    @torch.no_grad()
    def take(self, loaded: Tensor) -> None:
        """Takes over loaded values, before they are rounded into the half tensor."""
        precise = self.find_precise()
        if precise is not None:
            precise.copy_(loaded)
            self.written = version_of(precise)  # the half tensor is about to be loaded, too
        self.kept, self.shown = None, precise if self.shown is precise else None

    # Masters

    def make_master(self, touched: set[int], lock: StepLock, master: Parameter | None = None) -> None:
        """Makes a master of the float32 values, or takes one that optimizers step already."""
        half = self.half
        if master is None:
            master = Parameter(make_dense(self.read()), half.requires_grad)
        self.master = self.precise = master
        # Attributes that optimizers look for; what a wrapper holds is its own.
        master.__dict__.update(half.__dict__ | master.__dict__)
        self.touched, self.lock = touched, lock
        allow_any_grad(half)
        self.mark_synced()

    def is_edited(self) -> bool:
        """Whether the half tensor was written, or may have been, or swapped, since master and it agreed."""
        half = self.half
        if self.version != version_of(half) or (self.touched and id(half) in self.touched):
            return True
        return self.master is not None and self.pointer != half.data_ptr()

    @torch.no_grad()
    def take_edit(self) -> None:
        """Feeds the master with what was written into the half tensor; no host sync."""
        self._follow_reader()
        kept, self.kept = self._find_kept(), None
        values = self.master if kept is None else kept
        self.master.copy_(refine(values.detach(), self.half.detach()))  # type: ignore[union-attr]
        self.mark_synced()

    def show_edit(self) -> None:
        """Does so until the next step, which takes what is in the half tensor by then; no host sync."""
        self._follow_reader()
        if not self.is_edited():
            return
        kept = self._find_kept()
        if kept is None:
            kept = self.master.detach().clone()  # type: ignore[union-attr]
        self.take_edit()
        self.kept = kept
        self._keep_touched()

    def _find_kept(self) -> Tensor | None:
        if self.kept is not None and not (self.touched and id(self.half) in self.touched):
            self.kept = None  # a step has ended since
        return self.kept

    def _keep_touched(self) -> None:
        """Has the next step look at what the master only shows."""
        if self.kept is not None and self.touched is not None:
            self.touched.add(id(self.half))

    def settle(self, asked: Tensor) -> None:
        """Brings to the half tensor, or its master, what was written into the other one before.

        Its `.data` was asked for: who asks may write, which is noted, and whatever was written last counts.
        """
        with self.lock as is_free:
            if not is_free:
                return  # the step overwrites it
            if asked is self.half:
                self.follow()
            elif self.half.device == asked.device and self.half.shape == asked.shape:
                self.show_edit()
            if self.touched is not None:
                self.touched.add(id(asked))

    # The gradient, which master and half tensor hold together

    def hold_grad(self, grad: Tensor | None) -> None:
        """Has both sides hold a gradient, or none."""
        half = self.half
        set_grad(self.master, grad)
        if grad is None or TAKES_ANY_GRAD:
            try:
                set_grad(half, grad)
            except RuntimeError:  # it was swapped for another parameter since
                allow_any_grad(half)
                set_grad(half, grad)
        elif self.is_wrapper:  # of which `.data` is not what it wraps
            set_grad(half, None)
        else:
            give_float32_grad(half, grad)
            self.grad_pointer = _pointer_of(grad)

    def has_side(self, tensor: Tensor) -> bool:
        """Whether a tensor is the half one or its master, where there is one."""
        return self.master is not None and (tensor is self.half or tensor is self.master)

    def assign_grad(self, side: Tensor, grad: Tensor | None) -> None:
        """Has both sides hold what is assigned to one; raises as an assignment to a float32 parameter.

        A half gradient may be written by who made it: the half tensor alone holds it until it is cast.
        """
        if grad is None:
            self.hold_grad(None)
        elif side is self.half and isinstance(grad, Tensor) and grad.dtype is side.dtype:
            set_grad(side, grad)
            set_grad(self.master, None)
        else:
            self.hold_grad(grad)

    def holds_grad(self) -> bool:
        """Whether both sides hold one gradient, where each has a tensor of its own to show it."""
        grad, shown = self.master.grad, self.half.grad  # type: ignore[union-attr]
        if grad is None or shown is None:
            return grad is shown or (shown is None and self.is_wrapper)
        return _pointer_of(shown) == _pointer_of(grad) == self.grad_pointer

    def find_grad(self) -> Tensor | None:
        """The gradient that counts: what a backward has made is at the half tensor."""
        grad, own = self.half.grad, self.master.grad  # type: ignore[union-attr]
        if grad is None or TAKES_ANY_GRAD or own is None:
            return own if grad is None else grad
        return own if _pointer_of(grad) == self.grad_pointer else grad


def _pointer_of(grad: Tensor) -> int:
    values = grad._values() if grad.is_sparse else grad
    return values.data_ptr() if values.layout is torch.strided else 0
