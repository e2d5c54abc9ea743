"""How the C library keeps the memory that steps free and take again."""

from __future__ import annotations

import torch

# Bytes, with room for what the allocator adds: above 32 MiB glibc no longer adapts.
LARGEST = (32 << 20) - (16 << 10)


def keep_freed_memory() -> None:
    """Has glibc keep up to 64 MiB of freed memory, so that the next step need not ask the system for it.

    By default it returns large blocks as soon as they are free, and each step waits for page faults,
    thousands of them where gradients are large. Its thresholds follow the largest block freed so far, up to
    32 MiB (mallopt(3), M_MMAP_THRESHOLD). So one such block is made and freed here; it is never touched, and
    takes about 10 us. Thresholds that the user has set, and other allocators, stay as they are.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")
