"""Calls a function of `amp_C` on lists of tensors, as `multi_tensor_applier` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`; `multi_tensor_applier` is one.

    It is always available: there is nothing to build.
    """

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Returns: what apex had to build is always there. Scripts call it as a check."""

    def __call__(
        self,
        op: Callable,
        noop_flag_buffer: Tensor | None,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: object,
    ) -> object:
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


# The chunk size that apex had; nothing here is cut into chunks.
multi_tensor_applier = MultiTensorApply(2048 * 32)
