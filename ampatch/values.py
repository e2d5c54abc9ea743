"""The float32 values of a cast model's tensors: masters, or the originals while they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ampatch.masters import MasterParam, refine


@dataclass(frozen=True, slots=True)
class _Known:
    """A half tensor, the float32 values behind it, and its version when they agreed."""

    tensor: Tensor
    precise: Tensor | None
    version: int


class Float32Values:
    """Knows the float32 values behind half parameters and buffers, by the tensor's identity.

    A value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._pairs: dict[int, MasterParam] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def remember(self, tensor: Tensor, precise: Tensor | None) -> None:
        """Notes the float32 values of a half tensor."""
        self._known[id(tensor)] = _Known(tensor, precise, tensor._version)

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
        self._known.pop(id(tensor), None)
        self._pairs.pop(id(tensor), None)

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
        if known is None:
            return None
        holds = _is_comparable(tensor) or tensor._version == known.version
        return known.precise if holds else None

    @torch.no_grad()
    def read(self, tensor: Tensor) -> Tensor:
        """Returns the float32 values of a half tensor; shares the master's memory where it can.

        Costs a comparison with the half tensor, and so a host sync.
        """
        precise = self._get(tensor)
        half = tensor.detach()
        if precise is None:
            return half.float()
        if not _is_comparable(half):
            return precise
        precise = precise.detach().to(half.device)
        if torch.equal(precise.to(half.dtype), half):
            return precise
        return refine(precise, half)

    def export(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for a half tensor, of which it holds `saved`."""
        pair = self.find_pair(tensor)
        if saved is tensor and pair is not None:  # state_dict(keep_vars=True)
            return pair.master
        return self.read(tensor)

    @torch.no_grad()
    def take(self, tensor: Tensor, loaded: Tensor) -> None:
        """Takes over loaded values, before they are rounded into the half tensor."""
        precise = self._get(tensor)
        if precise is not None:
            precise.copy_(loaded)


def _is_comparable(tensor: Tensor) -> bool:
    """Whether torch can compare the values; of sparse and meta tensors only the version tells."""
    return not tensor.is_meta and tensor.layout is torch.strided
