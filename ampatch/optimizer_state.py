"""The state of an optimizer whose parameters changed their dtype, with no masters between."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.precision import HALF_TYPES


def lower_state(optimizer: Optimizer) -> None:
    """Casts the state of half parameters to their dtype, as `Optimizer.load_state_dict` would.

    At O3 the optimizer steps half parameters, and most kernels refuse a state of another dtype.
    """
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and param.dtype in HALF_TYPES:
            _cast(state, {torch.float32}, param.dtype)


def raise_states(optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
    """Casts the half state of float32 parameters to float32, in the optimizers that are alive."""
    alive = [optimizer for reference in optimizers if (optimizer := reference()) is not None]
    for param, state in [item for optimizer in alive for item in optimizer.state.items()]:
        if isinstance(param, Tensor) and param.dtype is torch.float32:
            _cast(state, set(HALF_TYPES), torch.float32)


def _cast(state: dict, sources: set[torch.dtype], dtype: torch.dtype) -> None:
    for key, value in state.items():
        # Optimizers count steps in float32 whatever the parameters are.
        if key != "step" and isinstance(value, Tensor) and value.dtype in sources:
            state[key] = value.to(dtype)
