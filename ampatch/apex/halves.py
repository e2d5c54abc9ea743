"""The half types, and what a half parameter's master knows better than it."""

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


def refine(master: Tensor, half: Tensor) -> Tensor:
    """Returns `master` where `half` is its rounding, and `half` in float32 where that was written."""
    return torch.where(master.to(half.dtype) == half, master, half.float())
