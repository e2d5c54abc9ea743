"""Whether this process is one rank of several, and what rank 0 alone prints."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch.distributed as dist
from torch.nn import Module


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def find_rank() -> int | None:
    """The rank of this process among several: that of torchrun while there is no process group yet."""
    environ = os.environ
    if has_ranks():
        return dist.get_rank() if dist.get_world_size() > 1 else None
    if environ.get("RANK", "").isdecimal() and environ.get("WORLD_SIZE", "1") != "1":
        return int(environ["RANK"])
    return None


def say(text: str) -> None:
    if not find_rank():
        print(text, flush=True)


def select_sharded(modules: Iterable[Module]) -> list[Module]:
    return list(filter(is_sharded, modules))


def is_sharded(module: Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")
