"""Whether a step broke: asked on the device, and known when it has answered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.instruments.values import is_finite, is_inexact
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.record import Record
from ampatch.levels.private import check_and_unscale_

LARGE = 8192  # numbers of a tensor from which its sum, which writes nothing, is faster than the fused check


class Flag:
    """1 on the device where a number is not finite; on a GPU the host hears of it later."""

    def __init__(self, found: Tensor | bool) -> None:
        self._found, self._arrived = found, None
        if isinstance(found, Tensor) and found.is_cuda:
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


class Check:
    """Checks gradients and losses; one fused kernel for each device and dtype."""

    def __init__(self) -> None:
        self._scalers: dict[torch.device, amp.LossScaler] = {}
        self._found, self._one = torch.zeros((), device="cpu"), torch.ones((), device="cpu")
        self._large: dict[int, list[bool]] = {}  # which are, by how many there are: sizes hardly change

    def of(self, tensors: list[Tensor]) -> Flag | None:
        """Returns whether all are finite, None for none at all; no host sync."""
        if tensors and tensors[0].is_cpu and {*map(type, tensors)} == {Tensor}:
            try:
                return Flag(self._is_any_bad(tensors))
            except RuntimeError:  # some are elsewhere, sparse, complex ...
                self._found.zero_()
        return self._ask(tensors)

    def _is_any_bad(self, tensors: list[Tensor]) -> bool:
        """Says whether a number is not finite; raises RuntimeError for what is not dense and on the host."""
        count = len(tensors)
        if count not in self._large:
            self._large[count] = [each.numel() > LARGE for each in tensors]
        large = list(compress(tensors, self._large[count]))
        are_plain = large and all(each.is_cpu and each.layout is torch.strided for each in large)
        if are_plain and torch.stack([each.sum() for each in large]).sum().isfinite():  # no number is bad
            tensors = [it for it, is_large in zip(tensors, self._large[count], strict=True) if not is_large]
        check_and_unscale_(tensors, self._found, self._one)  # by 1: it changes nothing
        is_bad = self._found.item() > 0
        if is_bad:
            self._found.zero_()
        return is_bad

    @torch.no_grad()
    def _ask(self, tensors: list[Tensor]) -> Flag | None:
        found = [each for each in tensors if is_inexact(each) and not each.is_meta]
        if not found:
            return None
        device = next((each.device for each in found if each.is_cuda), found[0].device)
        if device not in self._scalers:
            self._scalers[device] = amp.LossScaler(0, 1.0, device)
        scaler = self._scalers[device]
        flag = scaler.new_found_inf()
        scaler.begin(device).unscale_(found, flag)  # by 1: it changes nothing
        return Flag(flag)


@dataclass(slots=True)
class Step:
    """An attempt at a step whose outcome may still be on the device, and what it takes to replay it."""

    optimizer: weakref.ref[Optimizer]
    number: int
    record: Record
    flag: Flag | None
    outcomes: Sequence[amp.BackwardOutcome] = ()
    skipped: bool | None = None
    scale: float | None = None
    is_dynamic: bool = False

    def is_known(self) -> bool:
        """Says whether asking would not wait for a device."""
        is_late = self.flag is not None and self.flag.is_late
        return self.skipped or not (is_late or any(outcome.poll() is None for outcome in self.outcomes))

    def judge(self) -> Attempt:
        """Returns what came of it."""
        read = [outcome.read() for outcome in self.outcomes]
        bad = self.skipped or any(overflowed for overflowed, *_ in read)
        losses = all(outcome.is_loss_finite is not False for outcome in self.outcomes)
        scale = read[0][1] if read else self.scale
        is_flagged = self.flag is not None and self.flag.read()
        if is_flagged or bad:
            losses = losses and all(map(is_finite, self.record.losses))
        bad = bad or (is_flagged and losses)
        return Attempt(self.number, scale, self.is_dynamic or bool(read), losses, not bad)


def outcomes_of(optimizer: Optimizer) -> tuple[amp.BackwardOutcome, ...] | None:
    """Returns what our scaler found before the last step, None for an optimizer that is not ours."""
    try:
        return amp.backward_outcomes(optimizer)
    except amp.AmpError:
        return None


Object = TypeVar("Object")


def alive(references: Iterable[weakref.ref[Object]]) -> list[Object]:
    """Returns those objects that the script still has."""
    return [found for find in references if (found := find()) is not None]
