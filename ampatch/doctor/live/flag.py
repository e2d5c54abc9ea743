"""Whether all numbers of some tensors are finite, asked on the device and read when it has answered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ampatch as amp


class Flag:
    """1 on the device where a number is not finite; on a GPU the host hears of it later."""

    def __init__(self, found: Tensor) -> None:
        self._found, self._arrived = found, None
        if found.is_cuda:
            self._host = torch.empty((), device="cpu", pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._found, self._arrived = self._host, torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(found.device))

    @property
    def is_late(self) -> bool:
        """Says whether reading it might wait for the device."""
        return self._arrived is not None

    def read(self) -> bool:
        """Returns whether a number was not finite; waits until the device has come so far."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._found)


def can_overflow(dtype: torch.dtype, device: torch.device) -> bool:
    """Says whether tensors of a kind have numbers that may be inf or NaN."""
    return (dtype.is_floating_point or dtype.is_complex) and device.type != "meta"


class Check:
    """Checks gradients and losses; one fused kernel for each device and dtype."""

    def __init__(self) -> None:
        self._scalers: dict[torch.device, amp.LossScaler] = {}

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor]) -> Flag | None:
        """Returns whether all are finite, None for none at all; no host sync."""
        kinds = {(each.dtype, each.device) for each in tensors}
        known = {kind for kind in kinds if can_overflow(*kind)}
        found = [each for each in tensors if kinds == known or (each.dtype, each.device) in known]
        if not found:
            return None
        device = next((device for _, device in known if device.type == "cuda"), found[0].device)
        if device not in self._scalers:
            self._scalers[device] = amp.LossScaler(0, 1.0, device)
        scaler = self._scalers[device]
        flag = scaler.new_found_inf()
        scaler.begin(device).unscale_(found, flag)  # by 1: it changes nothing
        return Flag(flag)
