"""The float32 values of a cast model's tensors: masters, or the originals while they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from ampatch.masters import MasterParam, refine


class Float32Values:
    """Knows the float32 values behind half parameters and buffers, by the tensor's identity.

    A value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins.
    """

    def __init__(self) -> None:
        self._precise: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._pairs: dict[int, MasterParam] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._precise

    def remember(self, tensor: Tensor, precise: Tensor) -> None:
        """Notes the float32 values of a half tensor."""
        self._precise[id(tensor)] = (tensor, precise)

    def release(self, tensor: Tensor) -> None:
        """Frees the float32 values of a tensor, which stays known as one that was cast here."""
        self._precise[id(tensor)] = (tensor, None)

    def rename(self, tensor: Tensor, successor: Tensor) -> None:
        """Hands the float32 values of a tensor to the one that took its place."""
        _, precise = self._precise.pop(id(tensor), (None, None))
        self._precise[id(successor)] = (successor, precise)

    def forget(self, tensor: Tensor) -> None:
        """Drops what is known of a tensor."""
        self._precise.pop(id(tensor), None)
        self._pairs.pop(id(tensor), None)

    def find_pair(self, tensor: Tensor) -> MasterParam | None:
        """Returns the tensor's master, which several optimizers share."""
        return self._pairs.get(id(tensor))

    def set_pair(self, pair: MasterParam) -> None:
        """Lets a master's values stand for its half parameter."""
        self._pairs[id(pair.half)] = pair
        self.remember(pair.half, pair.master)

    def _get(self, tensor: Tensor) -> Tensor | None:
        _, precise = self._precise.get(id(tensor), (None, None))
        return precise

    @torch.no_grad()
    def read(self, tensor: Tensor) -> Tensor:
        """Returns the float32 values of a half tensor; shares the master's memory where it can.

        Costs a comparison with the half tensor, and so a host sync.
        """
        precise = self._get(tensor)
        half = tensor.detach()
        if precise is None:
            return half.float()
        if half.is_meta or half.layout is not torch.strided:  # torch cannot compare these
            return precise if tensor._version == 0 else half.float()
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
