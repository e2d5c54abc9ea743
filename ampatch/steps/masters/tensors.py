"""What masters ask of tensors: whether they were written, what can be compared, who has their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ampatch.levels.private import count_users


def refine(precise: Tensor, half: Tensor) -> Tensor:
    """Returns `precise` where `half` is its rounding, and `half` in float32 where it was changed."""
    return torch.where(precise.to(half.dtype) == half, precise, half.to(precise.dtype))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does: foreach functions may not know it."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def make_dense(tensor: Tensor) -> Tensor:
    """Returns a tensor whose elements fill its memory, in any order; others can have its strides."""
    is_dense = tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()
    return tensor if is_dense or is_wrapper(tensor) else tensor.contiguous()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written; one that was made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_comparable(tensor: Tensor) -> bool:
    """Whether torch can compare the values; of sparse and meta tensors only the version tells."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _count_users(tensor: Tensor) -> int | None:
    return count_users(tensor.untyped_storage()._cdata)


_ALONE = _count_users(torch.empty(1, device="cpu"))


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else has the memory of a tensor, and could write there without a trace."""
    return _ALONE is not None and _count_users(tensor) == _ALONE
