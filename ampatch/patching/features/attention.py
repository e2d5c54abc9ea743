"""Keeps attention modules off their fast paths while torch is patched: evaluation casts as training does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ampatch.casts.thread import ThreadState


def allow_fast_path(thread: ThreadState) -> Callable[[], bool]:
    """Returns what stands in for `torch.backends.mha.get_fastpath_enabled`: False where this thread casts.

    In evaluation `nn.MultiheadAttention` and `nn.TransformerEncoder` may make one C++ call for a whole
    layer, in the type of its weights. They make an exception for `torch.autocast`, but not for us.
    """
    original = torch.backends.mha.get_fastpath_enabled

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        if thread.off and thread.is_off():
            return original()
        return False

    return get_fastpath_enabled
