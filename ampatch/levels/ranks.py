"""Whether this process is one rank of several."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.nn import Module


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def select_sharded(modules: Iterable[Module]) -> list[Module]:
    """Returns those modules that FSDP2 has sharded."""
    return list(filter(is_sharded, modules))


def is_sharded(module: Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")
