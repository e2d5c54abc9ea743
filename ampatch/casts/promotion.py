"""Whether torch takes tensors of two types in one call by itself: asked of torch, not of a list."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

# The ways to give matrices to an op that we do not know: `add(x, y)`, `cat([x, y])`, `addcmul(x, y, y)`.
_CALLS: tuple[Callable[[Callable, Tensor, Tensor], object], ...] = (
    lambda function, x, y: function(x, y),
    lambda function, x, y: function([x, y]),
    lambda function, x, y: function(x, y, y),
    lambda function, x, y: function(x > 0, x, y),
)


def promotes(function: Callable) -> bool | None:
    """Whether an op takes a float32 and a float16 matrix together; None if it takes no two matrices.

    Calls it, so `function` must be an op of torch. Call it where nothing is cast.
    """
    function = inspect.unwrap(function)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in _CALLS:
            if _runs(call, function, torch.float32):
                return _runs(call, function, torch.float16)
    return None


def _runs(call: Callable, function: Callable, other: torch.dtype) -> bool:
    x, y = torch.full((2, 2), 0.5), torch.full((2, 2), 0.25, dtype=other)
    try:
        result = call(function, x, y)
    except Exception:  # whatever an op raises for arguments that it does not take
        return False
    return isinstance(result, Tensor)
