"""The state of an optimizer whose parameters changed their dtype, with no masters between."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.precision import HALF_TYPES


def fit_states(optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
    """Casts state to the dtype of its parameters, in the optimizers that are alive.

    As `Optimizer.load_state_dict` would: most kernels refuse a state of another dtype.
    """
    alive = [optimizer for reference in optimizers if (optimizer := reference()) is not None]
    for param, state in [item for optimizer in alive for item in optimizer.state.items()]:
        if isinstance(param, Tensor) and param.dtype in (torch.float32, *HALF_TYPES):
            _cast(state, param.dtype)


def _cast(state: dict, dtype: torch.dtype) -> None:
    for key, value in state.items():
        # Optimizers count steps in float32 whatever the parameters are.
        if key != "step":
            state[key] = _cast_value(value, dtype)


def _cast_value(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, list):  # LBFGS keeps its history in some
        return [_cast_value(item, dtype) for item in value]
    sources = {torch.float32} if dtype in HALF_TYPES else set(HALF_TYPES)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in sources else value
