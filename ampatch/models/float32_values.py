"""The float32 values of a cast model's tensors: masters, or the originals while they hold."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ampatch.levels.private import is_expanded
from ampatch.steps.masters import MasterParam, is_wrapper, refine


@dataclass(frozen=True, slots=True)
class _Known:
    """A half tensor, the float32 values behind it, and the versions of both when they agreed."""

    tensor: Tensor
    precise: Tensor | None
    version: int
    written: int


class Shown:
    """Whether a `state_dict` showed values of the models of a call: then their forwards look for edits."""

    def __init__(self) -> None:
        self.any = False


class Float32Values:
    """Knows the float32 values behind a module's half parameters and buffers, by the tensor's identity.

    The hooks of the module keep it alive, and with it the tensors: these live as long as the module.

    A value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins. But what was written into the float32
    values goes into the half tensor first: a `state_dict()` shows them, and who writes there, as
    averages of weights do, writes into the model.
    """

    def __init__(self, notice: Shown | None = None) -> None:
        self.notice = notice or Shown()
        self._known: dict[int, _Known] = {}
        self._pairs: dict[int, MasterParam] = {}
        # What a state_dict shows and no master stands for: the half tensor, and if it was made to be shown.
        self._shown: dict[int, tuple[Tensor, bool]] = {}

    def __deepcopy__(self, memo: dict) -> Float32Values:
        return Float32Values(copy.deepcopy(self.notice, memo))  # those of a copied model, which has none yet

    def __reduce__(self) -> tuple:
        return Float32Values, (self.notice,)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def remember(self, tensor: Tensor, precise: Tensor | None) -> None:
        """Notes the float32 values of a half tensor."""
        written = 0 if precise is None else _version(precise)
        self._known[id(tensor)] = _Known(tensor, precise, _version(tensor), written)

    def release(self, tensor: Tensor) -> None:
        """Frees the float32 values of a tensor, which stays known as one that was cast here."""
        self.remember(tensor, None)

    def rename(self, tensor: Tensor, successor: Tensor) -> None:
        """Hands the float32 values of a tensor to the one that took its place."""
        precise = self._get(tensor)
        self._known.pop(id(tensor), None)
        self.remember(successor, precise)

    def forget(self, tensor: Tensor) -> None:
        """Drops what is known of a tensor."""
        for known in (self._known, self._pairs, self._shown):
            known.pop(id(tensor), None)

    def pairs(self) -> list[MasterParam]:
        """The masters behind these tensors."""
        return list(self._pairs.values())

    def find_pair(self, tensor: Tensor) -> MasterParam | None:
        """Returns the tensor's master, which several optimizers share."""
        return self._pairs.get(id(tensor))

    def set_pair(self, pair: MasterParam) -> None:
        """Lets a master's values stand for its half parameter."""
        self._pairs[id(pair.half)] = pair
        self.remember(pair.half, pair.master)

    def _get(self, tensor: Tensor) -> Tensor | None:
        """The float32 values of a tensor, None where there are none or they may not hold any more."""
        known = self._known.get(id(tensor))
        if known is None or known.precise is None:
            return None
        if known.precise.is_meta and not tensor.is_meta:  # Module.to_empty: there were no values
            return None
        holds = _is_comparable(tensor) or _version(tensor) == known.version
        return known.precise if holds else None

    @torch.no_grad()
    def follow(self, tensor: Tensor) -> None:
        """Rounds float32 values that were written since into the half tensor; no host sync."""
        pair, known = self._pairs.get(id(tensor)), self._known.get(id(tensor))
        if pair is not None:
            if pair.was_master_edited():
                pair.copy_to_half()
        elif known is not None and known.precise is not None and _version(known.precise) != known.written:
            tensor.copy_(known.precise)
            self.remember(tensor, known.precise)
            if id(tensor) in self._shown:
                self._shown[id(tensor)] = tensor, False  # worth keeping

    def follow_shown(self) -> None:
        """Does so for what a state_dict showed, and frees what was made for that and not written."""
        for key, (tensor, is_made) in list(self._shown.items()):
            self.follow(tensor)
            if is_made and self._shown[key][1]:
                self.release(tensor)
                del self._shown[key]

    def follow_masters(self) -> None:
        """Does so for masters, where no optimizer is left that would."""
        for pair in self._pairs.values():
            self.follow(pair.half)

    @torch.no_grad()
    def read(self, tensor: Tensor) -> Tensor:
        """Returns the float32 values of a half tensor, in the master's memory where it can; no host sync.

        What was written into the half tensor since goes there first: on the device, so that nobody waits.
        """
        self.follow(tensor)
        precise, pair = self._get(tensor), self.find_pair(tensor)
        half = tensor.detach()
        if precise is None:
            return half.float()
        if not _is_comparable(half):
            return precise
        if precise.device != half.device or not _is_writable(precise):  # Module.to moved the half one
            return refine(precise.detach().to(half.device), half)
        precise.copy_(refine(precise.detach(), half))
        if pair is None:
            self.remember(tensor, precise)
        else:
            pair.master_version = precise._version
        return precise.detach()

    def export(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for a half tensor, of which it holds `saved`.

        What is written there before the model's next forward, or while it is kept, goes into the model.
        """
        pair, precise, shown = self.find_pair(tensor), self._get(tensor), self.read(tensor)
        is_new = precise is None or not _share_memory(shown, precise)
        if pair is not None:
            return pair.master if saved is tensor else shown  # state_dict(keep_vars=True)
        if is_new:
            self.remember(tensor, shown)
        self._shown.setdefault(id(tensor), (tensor, precise is None))
        self.notice.any = True
        return shown

    @torch.no_grad()
    def take(self, tensor: Tensor, loaded: Tensor) -> None:
        """Takes over loaded values, before they are rounded into the half tensor."""
        precise = self._get(tensor)
        if precise is not None:
            precise.copy_(loaded)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written; one that was made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_writable(tensor: Tensor) -> bool:
    return not tensor.is_inference() and not is_expanded(tensor)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or is_wrapper(other) or one.data_ptr() == other.data_ptr()


def _is_comparable(tensor: Tensor) -> bool:
    """Whether torch can compare the values; of sparse and meta tensors only the version tells."""
    return not tensor.is_meta and tensor.layout is torch.strided
