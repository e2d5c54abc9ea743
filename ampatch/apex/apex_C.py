"""What `apex_C` resolves to: tensors laid end to end in one buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import ampatch as amp


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the elements of all tensors in one new 1-dimensional tensor; they have one type."""
    with amp.disable_casts():
        return _flatten_dense_tensors(list(tensors)) if len(tensors) else torch.empty(0)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `flat`, one with the shape of each tensor; they share its memory."""
    with amp.disable_casts():
        return list(_unflatten_dense_tensors(flat, list(tensors)))
