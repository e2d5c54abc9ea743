"""One weight of a half model: the half tensor, and the float32 values that are its truth."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.levels.private import is_expanded
from ampatch.levels.stack import StepLock


def refine(precise: Tensor, half: Tensor) -> Tensor:
    """Returns `precise` where `half` is its rounding, and `half` in float32 where it was changed."""
    return torch.where(precise.to(half.dtype) == half, precise, half.to(precise.dtype))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does: foreach functions may not know it."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


class Weight:
    """A half parameter or buffer, and its float32 values: the originals while they hold, or a master.

    A float32 value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins. But what was written into the float32
    values goes into the half tensor first: a `state_dict()` shows them, and who writes there, as
    averages of weights do, writes into the model.

    A master is a parameter that optimizers step in the place of the half one. `touched` holds the ids of
    parameters that may have been written without a trace.
    """

    __slots__ = (
        *("half", "made_to_show", "is_shown", "is_wrapper", "master", "pointer", "precise", "touched"),
        *("__weakref__", "lock", "version", "written"),
        *("grad_alone", "grad_copy", "grad_scaled", "grad_seen", "grad_used", "grad_version"),
        *("optimizers", "steps"),
    )

    def __init__(self, half: Tensor, precise: Tensor | None = None) -> None:
        self.half = half
        self.precise = precise  # None where there are no float32 values, or none any more
        self.master: Parameter | None = None  # the same, once an optimizer steps them
        self.touched: set[int] = set()
        self.lock = StepLock()
        self.is_shown = False  # whether a state_dict shows what no master stands for
        self.made_to_show = False  # whether that was made to be shown
        # What `MasterGrads` knows of the half gradient: the one that has gone into the master's, and
        # the one that was there when it last looked, with its version; whether the used one is scaled, and
        # whether the master's has no others in it.
        self.grad_used: Tensor | None = None
        self.grad_seen: Tensor | None = None
        self.grad_version = 0
        self.grad_scaled = self.grad_alone = False
        self.grad_copy: Tensor | None = None  # what it was when its `.data` was asked for
        self.optimizers = 0  # how many step the master
        self.steps = 0  # how many of them have used its gradient
        self.is_wrapper = is_wrapper(half)
        self.mark_synced()

    # Float32 values

    def mark_synced(self) -> None:
        """Notes that the half tensor holds the rounding of the float32 values."""
        half, precise = self.half, self.precise
        self.version = _version(half)
        self.written = 0 if precise is None else _version(precise)
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
        return precise if _is_comparable(half) or _version(half) == self.version else None

    def find_written(self) -> Tensor | None:
        """The float32 values if they were written since the half tensor held their rounding; no host sync."""
        precise = self.precise
        if precise is None or (_version(precise) == self.written and not self.was_asked_last()):
            return None
        return precise

    def was_asked_last(self) -> bool:
        """Whether somebody asked for `.data` of the float32 values, and wrote no half tensor since."""
        return id(self.precise) in self.touched and _version(self.half) == self.version

    def follow(self) -> None:
        """Rounds the float32 values into the half tensor if they were written since; no host sync."""
        written = self.find_written()
        if written is None:
            return
        with torch.no_grad():
            self.half.copy_(written)
        self.mark_synced()
        self.made_to_show = False  # worth keeping

    def follow_shown(self) -> None:
        """Does so for what a state_dict showed, and frees what was made for that and not written."""
        if self.is_shown:
            self.follow()
            if self.made_to_show:
                self.is_shown = self.made_to_show = False
                self.remember(None)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Returns the float32 values, in the master's memory where it can; no host sync.

        What was written into the half tensor since goes there first: on the device, so that nobody waits.
        """
        with self.lock as is_free:
            return self._read(is_free)

    def _read(self, is_free: bool) -> Tensor:
        if is_free:
            self.follow()
        precise, half = self.find_precise(), self.half.detach()
        if precise is None:
            return half.float()
        if not is_free or not _is_comparable(half):
            return precise.detach()
        is_moved = precise.device != half.device  # by Module.to
        if is_moved or precise.is_inference() or is_expanded(precise):
            return refine(precise.detach().to(half.device), half)
        precise.copy_(refine(precise.detach(), half))
        self.written = precise._version  # and no more: who asked for `.data` may still write there
        return precise.detach()

    def export(self, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for the half tensor, of which it holds `saved`.

        What is written there before the model's next forward, or while it is kept, goes into the model.
        """
        precise, shown = self.find_precise(), self.read()
        if self.master is not None:
            return self.master if saved is self.half else shown  # state_dict(keep_vars=True)
        self.remember(shown)
        if not self.is_shown:
            self.is_shown, self.made_to_show = True, precise is None
        return shown

    @torch.no_grad()
    def take(self, loaded: Tensor) -> None:
        """Takes over loaded values, before they are rounded into the half tensor."""
        precise = self.find_precise()
        if precise is not None:
            precise.copy_(loaded)
            self.written = _version(precise)  # the half tensor is about to be loaded, too

    # Masters

    def make_master(self, touched: set[int], lock: StepLock, master: Parameter | None = None) -> None:
        """Makes a master of the float32 values, or takes one that optimizers step already."""
        half = self.half
        if master is None:
            master = Parameter(_make_dense(self.read()), half.requires_grad)
        self.master = self.precise = master
        # Attributes that optimizers look for; what a wrapper holds is its own.
        master.__dict__.update(half.__dict__ | master.__dict__)
        self.touched, self.lock = touched, lock
        self.mark_synced()

    def is_edited(self) -> bool:
        """Whether the half tensor was written, or may have been, or swapped, since master and it agreed."""
        half = self.half
        moved = self.pointer != half.data_ptr()
        return moved or self.version != _version(half) or id(half) in self.touched

    @torch.no_grad()
    def take_edit(self) -> None:
        """Feeds the master with what was written into the half tensor; no host sync."""
        self.master.copy_(refine(self.master.detach(), self.half.detach()))  # type: ignore[union-attr]
        self.mark_synced()

    def settle(self, asked: Tensor) -> None:
        """Brings to the half tensor, or its master, what was written into the other one before.

        Its `.data` was asked for: who asks may write, which is noted, and whatever was written last counts.
        """
        with self.lock as is_free:
            if not is_free:
                return  # the step overwrites it
            if asked is self.half:
                self.follow()
            elif self.half.device == asked.device and self.half.shape == asked.shape and self.is_edited():
                self.take_edit()
            self.touched.add(id(asked))

    def has_fresh_grad(self) -> bool:
        """Whether there is a half gradient that has not gone into the master's.

        DistributedDataParallel moves gradients to another tensor when it rebuilds its buckets, so
        another tensor with the same bits is the same gradient (to compare them costs a host sync).
        """
        grad, used = self.half.grad, self.grad_used
        if grad is None or grad is used:
            return False
        return used is None or not _is_same(grad, used)

    def was_grad_remade(self) -> bool:
        """Whether the half gradient that was used was cleared in place and made again, by no block."""
        grad = self.half.grad
        is_used = grad is not None and grad is self.grad_used
        return is_used and not self.grad_scaled and grad._version != self.grad_version

    def watch_grad(self) -> None:
        """Copies the half gradient, whose `.data` was asked for: what is written there leaves no trace."""
        grad = self.half.grad
        if grad is self.grad_seen and grad._version == self.grad_version:
            self.grad_copy, self.grad_version = grad.detach().clone(), ~grad._version  # no version there is

    def was_grad_read(self) -> bool:
        """Whether the half gradient is as it was when its `.data` was asked for; one host sync if it was."""
        before, self.grad_copy = self.grad_copy, None
        grad = self.half.grad
        is_traced = before is None or grad is not self.grad_seen or grad._version != ~self.grad_version
        if is_traced or not _is_same(grad, before):
            return False
        self.grad_version = grad._version
        return True


def _make_dense(tensor: Tensor) -> Tensor:
    """Returns a tensor whose elements fill its memory, in any order; others can have its strides."""
    is_dense = tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()
    return tensor if is_dense or is_wrapper(tensor) else tensor.contiguous()


def _is_same(grad: Tensor, other: Tensor) -> bool:
    if grad.is_sparse or other.is_sparse or grad.dtype != other.dtype:
        return False
    return torch.equal(grad.detach().view(torch.int16), other.detach().view(torch.int16))


def _version(tensor: Tensor) -> int:
    """How often a tensor was written; one that was made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_comparable(tensor: Tensor) -> bool:
    """Whether torch can compare the values; of sparse and meta tensors only the version tells."""
    return not tensor.is_meta and tensor.layout is torch.strided
