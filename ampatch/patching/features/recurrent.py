"""Lets recurrent modules with float32 weights take half inputs while torch is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.casts.thread import ThreadState
from ampatch.levels.precision import ELIGIBLE


def allow_half_input(thread: ThreadState) -> Callable[..., None]:
    """Returns what stands in for `torch.nn.RNNBase.check_input`, with every check but that of dtypes.

    The module compares the dtypes of input and weights before it calls the recurrent function, which
    is patched and casts both; it makes an exception for `torch.autocast`, but not for us.
    """
    original = torch.nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: torch.nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = self._flat_weights[0]
        casts = not (thread.off and thread.is_off())
        if casts and {input.dtype, weight.dtype} <= ELIGIBLE and input.dtype != weight.dtype:
            input = torch.empty_like(input, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return check_input
