"""Whether this process is one rank of several."""

from __future__ import annotations

import torch.distributed as dist


def has_ranks() -> bool:
    """Whether there are process groups at all."""
    return dist.is_available() and dist.is_initialized()
